#include "espalier/report/frontier_picture.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "espalier/base/error.h"
#include "espalier/base/units.h"
#include "espalier/report/html.h"
#include "espalier/report/page_style.h"

namespace espalier {
namespace {

constexpr double kWidth = 640, kHeight = 400, kLeft = 70, kRight = 470, kTop = 52, kBottom = 350;
constexpr double kLine = 16;  // of the names beside the lines

std::string text_at(double x, double y, const std::string& attributes, const std::string& text) {
  return "<text x=\"" + coordinate(x) + "\" y=\"" + coordinate(y) + "\" " + attributes + ">" + escaped(text) +
         "</text>\n";
}

// Numbers of responses stand at equal distances, prompts at their logarithms.
class Axes {
 public:
  explicit Axes(const Frontier& frontier) : sizes_(frontier.sizes.size()) {
    std::int64_t least = std::numeric_limits<std::int64_t>::max(), most = 1;
    for (const FrontierCell& cell : frontier.cells)
      if (cell.prompt > 0) least = std::min(least, cell.prompt), most = std::max(most, cell.prompt);
    low_ = std::floor(std::log2(static_cast<double>(std::min(least, most))));
    high_ = std::max(low_ + 1, std::ceil(std::log2(static_cast<double>(most))));
  }

  double x(std::size_t size) const {
    return sizes_ < 2 ? (kLeft + kRight) / 2
                      : kLeft + static_cast<double>(size) * (kRight - kLeft) / static_cast<double>(sizes_ - 1);
  }
  double y(std::int64_t prompt) const {
    return kBottom + (std::log2(static_cast<double>(prompt)) - low_) / (high_ - low_) * (kTop - kBottom);
  }

  std::string grid(const Frontier& frontier) const {
    std::string out;
    const double step = std::max(1.0, std::ceil((high_ - low_) / 8));
    for (double power = low_; power <= high_; power += step) {
      const auto prompt = static_cast<std::int64_t>(std::exp2(power));
      const std::string place = coordinate(y(prompt));
      out += "<path class=\"grid\" d=\"M" + coordinate(kLeft) + " " + place + "H" + coordinate(kRight) + "\"/>" +
             text_at(kLeft - 8, y(prompt) + 4, "class=\"axis\" text-anchor=\"end\"", format_count(prompt));
    }
    for (std::size_t size = 0; size < sizes_; ++size)
      out +=
          text_at(x(size), kBottom + 18, "class=\"axis\" text-anchor=\"middle\"", format_count(frontier.sizes[size]));
    return out + text_at((kLeft + kRight) / 2, kBottom + 36, "class=\"axis\" text-anchor=\"middle\"",
                         "responses to the prompt (N)");
  }

 private:
  std::size_t sizes_;
  double low_, high_;  // powers of two
};

std::string line_of(const Frontier& frontier, std::size_t way, const Axes& axes) {
  const std::string colour = text_of("c", way + 1);
  std::string path, dots;
  for (std::size_t size = 0; size < frontier.sizes.size(); ++size) {
    const FrontierCell& cell = frontier.cell(size, way);
    if (cell.prompt == 0) continue;
    const std::string x = coordinate(axes.x(size)), y = coordinate(axes.y(cell.prompt));
    path += (path.empty() ? "M" : "L") + x + " " + y;
    dots += "<circle class=\"dot " + colour + "\" cx=\"" + x + "\" cy=\"" + y + "\" r=\"3.5\"><title>" +
            escaped(text_of(cell.way, ", N = ", cell.n, ": prompts of ", format_count(cell.prompt), " tokens, ",
                            format_seconds(cell.cost.seconds), " a step, predicted")) +
            "</title></circle>";
  }
  return path.empty() ? "" : "<path class=\"line " + colour + "\" d=\"" + path + "\"/>" + dots + "\n";
}

// Beside the last points, moved apart where they would overlap.
std::string names_of(const Frontier& frontier, const Axes& axes) {
  std::vector<std::pair<double, std::size_t>> places;
  for (std::size_t way = 0; way < frontier.ways.size(); ++way)
    for (std::size_t size = frontier.sizes.size(); size-- > 0;)
      if (const std::int64_t prompt = frontier.cell(size, way).prompt; prompt > 0) {
        places.emplace_back(axes.y(prompt) + 4, way);
        break;
      }
  std::ranges::sort(places);
  for (std::size_t i = 1; i < places.size(); ++i)
    places[i].first = std::max(places[i].first, places[i - 1].first + kLine);
  std::string out;
  double lowest = kBottom + 4;
  for (std::size_t i = places.size(); i-- > 0; lowest -= kLine) {
    places[i].first = std::min(places[i].first, lowest);
    const std::size_t way = places[i].second;
    const double factor = frontier.factor(frontier.sizes.size() - 1, way);
    out += text_at(kRight + 10, places[i].first, text_of("class=\"name c", way + 1, "\""),
                   frontier.ways[way] + (way > 0 && factor > 0 ? ", x " + shown(factor, Unit::number) : ""));
  }
  return out;
}

}  // namespace

std::string frontier_picture(const Frontier& frontier) {
  const Axes axes(frontier);
  std::string out = text_of("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 ", kWidth, " ", kHeight,
                            "\" role=\"img\" style=\"background: var(--page)\">\n<style>", kPageStyle,
                            "svg { font-family: system-ui, sans-serif; fill: var(--text); }</style>\n");
  const std::string title = text_of("The longest prompt within ", format_bytes(frontier.memory_budget));
  out += "<title>" + escaped(title) + "</title>\n" + text_at(kLeft, 22, "font-size=\"15\" font-weight=\"600\"", title) +
         text_at(kLeft, 40, "class=\"axis\"",
                 text_of("tokens, with responses of ", format_count(frontier.response),
                         "; x: prompt and response over those of dense, at the last N"));
  out += axes.grid(frontier);
  for (std::size_t way = 0; way < frontier.ways.size(); ++way) out += line_of(frontier, way, axes);
  return out + names_of(frontier, axes) + "</svg>\n";
}

}  // namespace espalier
