// Curves over steps and stacked bars, as SVG inside a <figure>. Colours are classes of page_style.h, so that a page
// follows the reader's light or dark mode.
#pragma once

#include <string>
#include <vector>

#include "espalier/report/html.h"
#include "espalier/report/run_record.h"

namespace espalier {

// Ascending multiples of 1, 2 or 5 times a power of ten that cover [low, high]: the fewest steps with at least
// `intervals` of them, ends included. `low` == `high`: a range around them.
std::vector<double> nice_ticks(double low, double high, int intervals);

// Ticks as text, with as many digits as tell them apart.
std::vector<std::string> tick_labels(const std::vector<double>& ticks, Unit unit);

struct Series {
  std::string label;   // beside its last point, where there are several
  std::string colour;  // a class: c1, c2, ...
  Points points;
  bool marked = false;  // a dot at every point: few and far between
};

struct LineChart {
  std::string title;
  std::string note;  // what it means, in a line
  Unit unit = Unit::number;
  std::vector<Series> series;
  bool from_zero = false;
  bool exact = false;  // no means: the curve has no noise
};

// The figure; empty where no series has a point. Curves of 40 points or more are drawn thin, with the mean over a
// twentieth of them on top. Values show where the pointer rests.
std::string figure_of(const LineChart& chart);

struct StackPart {
  std::string label;
  std::string colour;
  Points points;  // one for each bar that has this part; equal steps are one bar
};

// Bars over steps, parts upwards in their order; more than 60 steps are drawn as means of neighbours.
std::string stacked_bars(const std::string& title, Unit unit, const std::vector<StackPart>& parts);

}  // namespace espalier
