// Two drawings: the line chart keeps its proportions (it stands in a grid of columns of nearly constant width), the
// bars stretch with the page, so their widths and places are percentages.
#include "espalier/report/chart.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <numeric>

#include "espalier/base/error.h"

namespace espalier {
namespace {

constexpr double kWidth = 360, kTop = 12, kBottom = 166;
constexpr double kAxisCharacter = 6.2, kNameCharacter = 7.6;  // widths in the style sheet's 11 and 12 pixel fonts
constexpr std::size_t kSmoothFrom = 40, kMostBands = 120, kMostBars = 60, kMostPairs = 500;

bool less_value(const std::pair<double, double>& a, const std::pair<double, double>& b) { return a.second < b.second; }

struct Scale {
  double low, high, from, to;
  double operator()(double value) const { return from + (value - low) / (high - low) * (to - from); }
};

Scale scale_of(const std::vector<double>& ticks, double from, double to) {
  return {ticks.front(), ticks.back(), from, to};
}

// Means over the points from `window` / 2 before to `window` / 2 after each.
Points smoothed(const Points& points, std::size_t window) {
  std::vector<double> sums = {0};
  for (const auto& [step, value] : points) sums.push_back(sums.back() + value);
  Points out;
  for (std::size_t i = 0; i < points.size(); ++i) {
    const std::size_t begin = i - std::min(i, window / 2), end = std::min(points.size(), i + window / 2 + 1);
    out.emplace_back(points[i].first, (sums[end] - sums[begin]) / static_cast<double>(end - begin));
  }
  return out;
}

// A curve of thousands of points keeps the least and the most of each of kMostPairs runs of neighbours: no spike is
// lost.
Points thinned(const Points& points) {
  const std::size_t stride = (points.size() + kMostPairs - 1) / kMostPairs;
  if (stride <= 2) return points;
  Points out;
  for (std::size_t begin = 0; begin < points.size(); begin += stride) {
    const auto first = points.begin() + static_cast<std::ptrdiff_t>(begin);
    const auto last = points.begin() + static_cast<std::ptrdiff_t>(std::min(begin + stride, points.size()));
    auto [low, high] = std::minmax_element(first, last, less_value);
    if (high < low) std::swap(low, high);
    out.push_back(*low);
    if (high != low) out.push_back(*high);
  }
  return out;
}

std::string path_of(const Points& all, const Scale& x, const Scale& y, const std::string& classes) {
  std::string d;
  for (const auto& [step, value] : thinned(all))
    d += (d.empty() ? "M" : "L") + coordinate(x(step)) + " " + coordinate(y(value));
  return "<path class=\"" + classes + "\" d=\"" + d + "\"/>";
}

std::string text_at(double x, double y, const std::string& attributes, const std::string& text) {
  return "<text x=\"" + coordinate(x) + "\" y=\"" + coordinate(y) + "\" " + attributes + ">" + escaped(text) +
         "</text>";
}

// Room for the longest of some texts.
double width_of(const std::vector<std::string>& texts, double character) {
  std::size_t longest = 0;
  for (const std::string& text : texts) longest = std::max(longest, text.size());
  return static_cast<double>(longest) * character;
}

// So many of the ticks that their labels keep apart, each as far from the next.
std::string step_labels(const std::vector<double>& ticks, const Scale& x) {
  std::vector<std::string> labels;
  std::vector<double> inside;
  for (const double step : ticks)
    if (step >= x.low && step <= x.high) inside.push_back(step), labels.push_back(shown(step, Unit::count));
  if (inside.empty()) return "";
  const double between = inside.size() > 1 ? x(inside[1]) - x(inside[0]) : 1;
  const auto stride = static_cast<std::size_t>(std::ceil((width_of(labels, kAxisCharacter) + 8) / between));
  std::string out;
  for (std::size_t i = 0; i < inside.size(); i += std::max<std::size_t>(stride, 1))
    out += text_at(x(inside[i]), kBottom + 16, "class=\"axis\" text-anchor=\"middle\"", labels[i]);
  return out;
}

std::string grid_of(const std::vector<double>& steps, const std::vector<double>& values,
                    const std::vector<std::string>& labels, const Scale& x, const Scale& y) {
  std::string out;
  for (std::size_t i = 0; i < values.size(); ++i)
    out += "<path class=\"grid\" d=\"M" + coordinate(x.from) + " " + coordinate(y(values[i])) + "H" + coordinate(x.to) +
           "\"/>" + text_at(x.from - 6, y(values[i]) + 4, "class=\"axis\" text-anchor=\"end\"", labels[i]);
  return out + step_labels(steps, x);
}

std::string curve_of(const Series& series, bool exact, const Scale& x, const Scale& y) {
  const std::size_t size = series.points.size();
  std::string out;
  if (size >= kSmoothFrom && !exact)
    out = path_of(series.points, x, y, "line faint " + series.colour) +
          path_of(smoothed(series.points, size / 20), x, y, "line " + series.colour);
  else
    out = path_of(series.points, x, y, "line " + series.colour);
  for (const auto& [step, value] : series.points)
    if (series.marked || size == 1)
      out += "<circle class=\"dot " + series.colour + "\" cx=\"" + coordinate(x(step)) + "\" cy=\"" +
             coordinate(y(value)) + "\" r=\"3\"/>";
  return out;
}

// Names beside the last points, moved apart where they would overlap, and none down to the labels of the steps.
std::string names_of(const std::vector<const Series*>& series, const Scale& x, const Scale& y) {
  std::vector<std::pair<double, const Series*>> places;
  places.reserve(series.size());
  for (const Series* each : series) places.emplace_back(y(each->points.back().second) + 4, each);
  std::stable_sort(places.begin(), places.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  constexpr double kLine = 13;
  for (std::size_t i = 1; i < places.size(); ++i)
    places[i].first = std::max(places[i].first, places[i - 1].first + kLine);
  double lowest = kBottom + 2;
  for (auto place = places.rbegin(); place != places.rend(); ++place, lowest -= kLine)
    place->first = std::min(place->first, lowest);
  std::string out;
  for (const auto& [place, each] : places)
    out += text_at(x.to + 6, place, "class=\"name " + each->colour + "\"", each->label);
  return out;
}

// Bands over the whole height, each with the values of the step nearest to it as its tooltip.
std::string bands_of(const LineChart& chart, const Scale& x) {
  std::map<double, std::string> texts;
  for (const Series& series : chart.series)
    for (const auto& [step, value] : series.points) {
      std::string& text = texts[step];
      text += (text.empty() ? "step " + shown(step, Unit::count) + ": " : ", ") +
              (chart.series.size() > 1 ? series.label + " " : "") + shown(value, chart.unit);
    }
  std::vector<std::pair<double, std::string>> kept;
  const std::size_t stride = (texts.size() + kMostBands - 1) / kMostBands;
  std::size_t index = 0;
  for (const auto& entry : texts)
    if (index++ % stride == 0) kept.emplace_back(entry);
  std::string out;
  for (std::size_t i = 0; i < kept.size(); ++i) {
    const double begin = i == 0 ? x.from : (x(kept[i - 1].first) + x(kept[i].first)) / 2;
    const double end = i + 1 == kept.size() ? x.to : (x(kept[i].first) + x(kept[i + 1].first)) / 2;
    out += "<rect class=\"band\" x=\"" + coordinate(begin) + "\" y=\"" + coordinate(kTop) + "\" width=\"" +
           coordinate(end - begin) + "\" height=\"" + coordinate(kBottom - kTop) + "\"><title>" +
           escaped(kept[i].second) + "</title></rect>";
  }
  return out;
}

std::string caption_of(const LineChart& chart, const std::vector<const Series*>& drawn) {
  std::string last;
  for (const Series* series : drawn)
    last += (last.empty() ? "" : " &middot; ") + text_of("<span class=\"", series->colour, "\">",
                                                         shown(series->points.back().second, chart.unit), "</span>");
  return "<figcaption><strong>" + escaped(chart.title) + "</strong> <span class=\"last\">" + last + "</span><br>" +
         "<span class=\"note\">" + escaped(chart.note) + "</span></figcaption>";
}

std::string description_of(const LineChart& chart, const std::vector<const Series*>& drawn) {
  std::string out;
  for (const Series* series : drawn) {
    const auto [low, high] = std::minmax_element(series->points.begin(), series->points.end(), less_value);
    out += text_of(series->label.empty() ? chart.title : series->label, ": ", series->points.size(), " points, first ",
                   shown(series->points.front().second, chart.unit), ", last ",
                   shown(series->points.back().second, chart.unit), ", least ", shown(low->second, chart.unit),
                   ", most ", shown(high->second, chart.unit), ". ");
  }
  return out;
}

struct Range {
  double low = INFINITY, high = -INFINITY;
  void take(double value) { low = std::min(low, value), high = std::max(high, value); }
};

// Whole steps only: a run of two steps has no step 1.5.
std::vector<double> step_ticks(const Range& steps) {
  std::vector<double> ticks;
  for (const double tick : nice_ticks(steps.low, steps.high, 4))
    if (tick == std::floor(tick)) ticks.push_back(tick);
  return ticks;
}

// --- Stacked bars: x and width in percent of the drawing ---

constexpr double kBarsBase = 186;

struct Bar {
  double first, last;  // steps
  std::vector<double> parts;
};

std::vector<Bar> bars_of(const std::vector<StackPart>& parts) {
  std::map<double, std::vector<double>> by_step;
  for (std::size_t p = 0; p < parts.size(); ++p)
    for (const auto& [step, value] : parts[p].points) {
      by_step[step].resize(parts.size());
      by_step[step][p] += value;
    }
  std::vector<Bar> bars;
  const std::size_t stride = (by_step.size() + kMostBars - 1) / kMostBars;
  std::size_t index = 0;
  for (const auto& [step, values] : by_step) {
    if (index++ % stride == 0) bars.push_back({step, step, std::vector<double>(parts.size())});
    Bar& bar = bars.back();
    bar.last = step;
    const auto steps = static_cast<double>(std::min(stride, by_step.size() - (bars.size() - 1) * stride));
    for (std::size_t p = 0; p < parts.size(); ++p) bar.parts[p] += values[p] / steps;
  }
  return bars;
}

// Labels stand left of the drawing, in its padding.
std::string bars_grid(const std::vector<double>& ticks, const std::vector<std::string>& labels, const Scale& y) {
  std::string out;
  for (std::size_t i = 0; i < ticks.size(); ++i) {
    const std::string place = coordinate(y(ticks[i]));
    out += text_of("<line class=\"grid\" x1=\"0\" x2=\"100%\" y1=\"", place, "\" y2=\"", place,
                   "\"/><text class=\"axis\" text-anchor=\"end\" x=\"-6\" y=\"", coordinate(y(ticks[i]) + 4), "\">",
                   labels[i], "</text>");
  }
  return out;
}

std::string bar_of(const Bar& bar, double left, double width, Unit unit, const std::vector<StackPart>& parts,
                   const Scale& y) {
  const std::string steps =
      bar.first == bar.last ? "step " + shown(bar.first, Unit::count)
                            : "mean of steps " + shown(bar.first, Unit::count) + " to " + shown(bar.last, Unit::count);
  std::string out;
  double below = 0;
  for (std::size_t p = 0; p < parts.size(); ++p) {
    if (bar.parts[p] <= 0) continue;
    const double top = y(below + bar.parts[p]), bottom = y(below);
    out += "<rect class=\"fill " + parts[p].colour + "\" x=\"" + coordinate(left) + "%\" width=\"" + coordinate(width) +
           "%\" y=\"" + coordinate(top) + "\" height=\"" + coordinate(bottom - top) + "\"><title>" +
           escaped(parts[p].label + ", " + steps + ": " + shown(bar.parts[p], unit)) + "</title></rect>";
    below += bar.parts[p];
  }
  return out;
}

}  // namespace

std::vector<double> nice_ticks(double low, double high, int intervals) {
  // A range that doubles cannot divide is one value.
  const double largest = std::max(std::abs(low), std::abs(high));
  if (largest < 1e-300) low = high = 0;
  if (high - low <= 1e-9 * largest) {
    const double around = low == 0 ? 1 : std::abs(low) / 2;
    return nice_ticks(low - (low > 0 ? around : 0), high + (low > 0 ? 0 : around), intervals);
  }
  const double rough = (high - low) / intervals, power = std::pow(10, std::floor(std::log10(rough)));
  const double digit = rough / power, step = power * (digit >= 5 ? 5 : digit >= 2 ? 2 : 1);
  // The quotients are rounded where they are whole but for rounding, so that no empty interval is added.
  const double first = std::floor(low / step + 1e-9), last = std::ceil(high / step - 1e-9);
  std::vector<double> ticks;
  for (double i = first; i <= last; ++i) ticks.push_back(i * step);
  return ticks;
}

std::vector<std::string> tick_labels(const std::vector<double>& ticks, Unit unit) {
  std::vector<std::string> labels;
  const double most = std::max(std::abs(ticks.front()), std::abs(ticks.back()));
  const double step = ticks.size() > 1 ? ticks[1] - ticks[0] : most;
  const double factor = unit == Unit::percent ? 100 : 1;
  const int decimals = std::max(0, -static_cast<int>(std::floor(std::log10(step * factor) + 1e-9)));
  for (const double tick : ticks) {
    if (unit == Unit::count || unit == Unit::bytes || (unit == Unit::seconds && most >= 100)) {
      labels.push_back(tick == 0 ? "0" : shown(tick, unit));
      continue;
    }
    char text[64];
    if (unit == Unit::number && (most >= 1e5 || decimals > 4))
      std::snprintf(text, sizeof text, "%.3g", std::abs(tick) < step / 2 ? 0 : tick);
    else
      std::snprintf(text, sizeof text, "%.*f%s", decimals, std::abs(tick) < step / 2 ? 0 : tick * factor,
                    unit == Unit::percent   ? " %"
                    : unit == Unit::seconds ? " s"
                                            : "");
    labels.push_back(text);
  }
  return labels;
}

std::string figure_of(const LineChart& chart) {
  std::vector<const Series*> drawn;
  Range steps, values;
  for (const Series& series : chart.series) {
    if (series.points.empty()) continue;
    drawn.push_back(&series);
    for (const auto& [step, value] : series.points) steps.take(step), values.take(value);
  }
  if (drawn.empty()) return "";
  if (chart.from_zero) values.take(0);
  std::vector<std::string> names;
  for (const Series* series : drawn) names.push_back(series->label);
  const double right = kWidth - (drawn.size() > 1 ? width_of(names, kNameCharacter) + 10 : 10);
  const std::vector<double> ticks = nice_ticks(values.low, values.high, 3);
  const std::vector<std::string> labels = tick_labels(ticks, chart.unit);
  const Scale y = scale_of(ticks, kBottom, kTop);
  const double beside = steps.high > steps.low ? 0 : 0.5;  // one step stands in the middle
  const Scale x{steps.low - beside, steps.high + beside, width_of(labels, kAxisCharacter) + 8, right};
  std::string out =
      "<figure class=\"chart\">" + caption_of(chart, drawn) + "<svg viewBox=\"0 0 360 190\" role=\"img\">";
  out += "<title>" + escaped(chart.title) + " over steps</title><desc>" + escaped(description_of(chart, drawn)) +
         "</desc>" + grid_of(step_ticks(steps), ticks, labels, x, y);
  for (const Series* series : drawn) out += curve_of(*series, chart.exact, x, y);
  if (drawn.size() > 1) out += names_of(drawn, x, y);
  return out + bands_of(chart, x) + "</svg></figure>\n";
}

std::string stacked_bars(const std::string& title, Unit unit, const std::vector<StackPart>& parts) {
  const std::vector<Bar> bars = bars_of(parts);
  if (bars.empty()) return "";
  double most = 0;
  for (const Bar& bar : bars) most = std::max(most, std::accumulate(bar.parts.begin(), bar.parts.end(), 0.0));
  const std::vector<double> ticks = nice_ticks(0, most, 3);
  const Scale y = scale_of(ticks, kBarsBase, 10);
  const std::vector<std::string> labels = tick_labels(ticks, unit);
  std::string out =
      "<svg class=\"wide\" style=\"padding-left:" + coordinate(std::ceil(width_of(labels, kAxisCharacter) + 8)) +
      "px\" width=\"100%\" height=\"212\" role=\"img\"><title>" + escaped(title) + "</title><desc>Bars over steps " +
      shown(bars.front().first, Unit::count) + " to " + shown(bars.back().last, Unit::count) +
      "; the table beside holds the means.</desc>" + bars_grid(ticks, labels, y);
  const double pitch = std::min(100 / static_cast<double>(bars.size()), 12.0);
  const std::size_t named = (bars.size() + 5) / 6;
  for (std::size_t b = 0; b < bars.size(); ++b) {
    const double left = pitch * (static_cast<double>(b) + 0.1);
    out += bar_of(bars[b], left, pitch * 0.8, unit, parts, y);
    if (b % named == 0)
      out += "<text class=\"axis\" text-anchor=\"middle\" x=\"" + coordinate(left + pitch * 0.4) + "%\" y=\"204\">" +
             shown(bars[b].first, Unit::count) + "</text>";
  }
  return out + "</svg>";
}

}  // namespace espalier
