// Ticks, numbers and text of the page's drawings.
#include "espalier/report/chart.h"

#include <gtest/gtest.h>

#include <cmath>
#include <regex>
#include <set>

namespace espalier {
namespace {

TEST(NiceTicks, CoverTheRangeInEqualStepsOfOneTwoOrFive) {
  for (const auto& [low, high] : {std::pair(0.0, 1.0),
                                  {0.18, 0.79},
                                  {-3.2e-5, 4e-6},
                                  {99999.0, 100001.0},
                                  {0.0, 7e12},
                                  {-5.0, -4.9},
                                  {1.0, 2.0},
                                  {0.0, 3.0}})
    for (int intervals = 1; intervals <= 5; ++intervals) {
      const std::vector<double> ticks = nice_ticks(low, high, intervals);
      ASSERT_GE(ticks.size(), 2u);
      const double step = ticks[1] - ticks[0], power = std::pow(10, std::floor(std::log10(step * 1.0001)));
      const double digit = step / power;
      EXPECT_TRUE(std::abs(digit - 1) < 1e-6 || std::abs(digit - 2) < 1e-6 || std::abs(digit - 5) < 1e-6) << digit;
      // Covered up to the rounding of a quotient that is whole.
      EXPECT_LE(ticks.front(), low + step * 1e-6);
      EXPECT_GE(ticks.back(), high - step * 1e-6);
      EXPECT_GT(ticks.front(), low - step);
      EXPECT_LT(ticks.back(), high + step);
      EXPECT_GE(ticks.size(), static_cast<std::size_t>(intervals) + 1);
      EXPECT_LE(ticks.size(), static_cast<std::size_t>(intervals) * 3 + 3);
      for (std::size_t i = 1; i < ticks.size(); ++i) EXPECT_NEAR(ticks[i] - ticks[i - 1], step, step * 1e-6);
    }
}

TEST(NiceTicks, OneValueHasARangeAroundIt) {
  for (const double value : {0.0, 3.0, -2e-7, 1e9}) {
    const std::vector<double> ticks = nice_ticks(value, value, 3);
    EXPECT_LE(ticks.front(), value);
    EXPECT_GE(ticks.back(), value);
    EXPECT_LT(ticks.front(), ticks.back());
  }
}

TEST(NiceTicks, EndForRangesThatDoublesCannotDivide) {
  for (const auto& [low, high] : {std::pair(1e18, 1e18 + 128),
                                  {0.0, 5e-324},
                                  {-1e290, 1e290},
                                  {1e290, 1e290},
                                  {-3.0, std::nextafter(-3.0, 0.0)}}) {
    const std::vector<double> ticks = nice_ticks(low, high, 3);
    ASSERT_GE(ticks.size(), 2u);
    EXPECT_LE(ticks.size(), 12u);
    const double step = ticks[1] - ticks[0];
    EXPECT_LE(ticks.front(), low + step * 1e-6);
    EXPECT_GE(ticks.back(), high - step * 1e-6);
    for (const double tick : ticks) EXPECT_TRUE(std::isfinite(tick));
    EXPECT_EQ(tick_labels(ticks, Unit::number).size(), ticks.size());
  }
}

TEST(TickLabels, TellTheTicksApart) {
  for (const auto& [low, high] : {std::pair(0.0, 1.0), {0.1, 0.100003}, {0.0, 2e-9}, {-5e6, 7e7}, {0.0, 0.006}})
    for (const Unit unit : {Unit::number, Unit::percent, Unit::seconds}) {
      const std::vector<double> ticks = nice_ticks(low, high, 3);
      const std::vector<std::string> labels = tick_labels(ticks, unit);
      ASSERT_EQ(labels.size(), ticks.size());
      // Three digits are all that a label of tiny differences of large numbers has room for.
      if (high - low > 1e-3 * std::max(std::abs(high), std::abs(low))) {
        EXPECT_EQ(std::set<std::string>(labels.begin(), labels.end()).size(), labels.size()) << labels.front();
      }
    }
  EXPECT_EQ(tick_labels({0, 0.5, 1}, Unit::percent), (std::vector<std::string>{"0 %", "50 %", "100 %"}));
  EXPECT_EQ(tick_labels({0, 0.02, 0.04}, Unit::number), (std::vector<std::string>{"0.00", "0.02", "0.04"}));
  EXPECT_EQ(tick_labels({0, 20000, 40000}, Unit::count), (std::vector<std::string>{"0", "20,000", "40,000"}));
}

TEST(Html, TextCanCarryNoMarkup) {
  EXPECT_EQ(escaped("<script>alert('x' & \"y\")</script>"),
            "&lt;script&gt;alert(&#39;x&#39; &amp; &quot;y&quot;)&lt;/script&gt;");
  EXPECT_EQ(escaped(std::string("a\0b\x1b[31m\n\t\x7f", 11)), "a&#xfffd;b&#xfffd;[31m\n\t&#xfffd;");
  EXPECT_EQ(escaped("\xc3\xa4\xe2\x82\xac"), "\xc3\xa4\xe2\x82\xac");
}

TEST(Html, CoordinatesAreShort) {
  EXPECT_EQ(coordinate(12), "12");
  EXPECT_EQ(coordinate(1.0 / 3), "0.33");
  EXPECT_EQ(coordinate(2.5), "2.5");
  EXPECT_EQ(coordinate(-0.001), "0");
  EXPECT_EQ(coordinate(100), "100");
}

TEST(LineChart, WithoutAPointThereIsNone) {
  EXPECT_EQ(figure_of({"Empty", "", Unit::number, {{"a", "c1", {}}, {"b", "c2", {}}}}), "");
  EXPECT_EQ(stacked_bars("Empty", Unit::seconds, {{"a", "plan", {}}}), "");
}

TEST(LineChart, EveryValueIsInATooltipAndInsideTheFrame) {
  const std::string figure = figure_of(
      {"Loss <1>", "a & b", Unit::number, {{"mine", "c1", {{1, 0.5}, {2, -0.25}}}, {"yours", "c2", {{2, 4}}}}});
  for (const char* part :
       {"Loss &lt;1&gt;", "a &amp; b", "step 1: mine 0.5</title>", "step 2: mine -0.25, yours 4</title>",
        ">mine</text>", ">yours</text>", "least -0.25, most 0.5"})
    EXPECT_NE(figure.find(part), std::string::npos) << part << "\n" << figure;
  EXPECT_EQ(figure.find("nan"), std::string::npos);
}

// Every text of a drawing as a box: x from, x to, baseline. Widths are those that the drawing reckons with.
struct TextBox {
  double from, to, y;
  std::string text;
};
std::vector<TextBox> texts_of(const std::string& figure) {
  static const std::regex kText(
      "<text x=\"([^\"]*)\" y=\"([^\"]*)\" class=\"(axis|name)[^\"]*\"(?: "
      "text-anchor=\"(end|middle)\")?>([^<]*)</text>");
  std::vector<TextBox> out;
  for (std::sregex_iterator at(figure.begin(), figure.end(), kText), end; at != end; ++at) {
    const std::string text = (*at)[5], anchor = (*at)[4];
    const double width = static_cast<double>(text.size()) * ((*at)[3] == "axis" ? 6.2 : 7.6), x = std::stod((*at)[1]);
    const double from = anchor == "end" ? x - width : anchor == "middle" ? x - width / 2 : x;
    out.push_back({from, from + width, std::stod((*at)[2]), text});
  }
  return out;
}

TEST(LineChart, NoTextRunsIntoAnotherOrOutOfTheDrawing) {
  for (const double scale : {1.0, 1e-6, 1e7})
    for (const double last : {3.0, 19.0, 190000.0})
      for (const Unit unit : {Unit::number, Unit::percent, Unit::seconds, Unit::count, Unit::bytes}) {
        const LineChart chart{"a",
                              "",
                              unit,
                              {{"measured", "c1", {{0, 0.9 * scale}, {last, 0.011 * scale}}},
                               {"predicted", "c3", {{0, 0.8 * scale}, {last, 0.01 * scale}}},
                               {"held out", "c2", {{0, 0.7 * scale}, {last, 0}}}}};
        const std::vector<TextBox> texts = texts_of(figure_of(chart));
        ASSERT_GE(texts.size(), 8u);
        for (const TextBox& a : texts) {
          EXPECT_GE(a.from, 0) << a.text;
          EXPECT_LE(a.to, 360) << a.text;
          EXPECT_LE(a.y, 190) << a.text;
          for (const TextBox& b : texts) {
            const bool side_by_side = a.to <= b.from || b.to <= a.from;
            EXPECT_TRUE(&a == &b || std::abs(a.y - b.y) >= 11 || side_by_side) << a.text << " and " << b.text;
          }
        }
      }
}

TEST(LineChart, LongCurvesAreThinUnderTheirMeans) {
  Points points;
  for (int i = 0; i < 100; ++i) points.emplace_back(i, i % 2);
  const LineChart noisy{"a", "", Unit::number, {{"", "c1", points}}};
  EXPECT_NE(figure_of(noisy).find("line faint c1"), std::string::npos);
  LineChart exact = noisy;
  exact.exact = true;
  EXPECT_EQ(figure_of(exact).find("faint"), std::string::npos);
}

TEST(LineChart, OfThousandsOfPointsNoSpikeIsLost) {
  LineChart chart{"a", "", Unit::number, {{"", "c1", {}}}, true, true};
  for (int i = 0; i < 20000; ++i) chart.series[0].points.emplace_back(i, i == 12345 ? 10 : 1);
  const std::string figure = figure_of(chart);
  // The frame ends at y = 12; the value of the spike is its upper end.
  EXPECT_NE(figure.find(" 12L"), std::string::npos);
  EXPECT_LT(figure.size(), 40000u);
}

TEST(StackedBars, ManyStepsAreMeansOfNeighbours) {
  StackPart part{"waves", "phaseB", {}};
  for (int i = 1; i <= 130; ++i) part.points.emplace_back(i, i);
  const std::string bars = stacked_bars("Seconds", Unit::seconds, {part});
  // 130 steps in bars of three: 44 of them, the last of one step.
  EXPECT_NE(bars.find("waves, mean of steps 1 to 3: 2 s"), std::string::npos) << bars;
  EXPECT_NE(bars.find("waves, step 130: 2 min 10 s"), std::string::npos) << bars;
  EXPECT_EQ(bars.find("131"), std::string::npos);
}

}  // namespace
}  // namespace espalier
