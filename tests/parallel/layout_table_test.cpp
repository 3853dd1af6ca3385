// Every layout under every schedule against one process in float64: the table of docs/parallel.md, written to a file.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <sstream>

#include "espalier/base/error.h"
#include "tests/parallel/layouts.h"

namespace espalier::testing {
namespace {

struct Column {
  std::string name;
  Case c;
};

// A vocabulary of 50 and two key/value heads: tp 4 divides neither. Three groups, fewer than many layouts have ranks of
// dp; trees fork below their prompts.
std::vector<Column> columns_of(const std::string& family) {
  Case c;
  c.family = family;
  c.rollouts = ragged_rollouts();
  Case tree = c;
  tree.rollouts.groups = 6, tree.rollouts.shared_start = 0.7;
  return {{"dense", with(c, {"", "dense", 0, "auto"})},
          {"packed", with(c, {"", "packed", 7, "auto"})},
          {"phased", with(c, {"", "phased", 7, "recompute"})},
          {"tree", with(tree, {"", "phased", 6, "keep"})}};
}

std::vector<Degrees> degrees_of_rows() {
  std::vector<Degrees> out;
  for (const std::int64_t tp : {1, 2, 4})
    for (const std::int64_t dp : {1, 2, 3, 4, 6, 8})
      if (const Degrees d{.tp = tp, .dp = dp}; d.ranks() > 1 && d.ranks() <= 12) out.push_back(d);
  for (const std::int64_t tp : {1, 2, 4})
    for (const std::int64_t dp : {1, 2, 3, 4, 6, 8})
      for (const std::int64_t ep : {2, 4, 8})
        if (const Degrees d{.tp = tp, .dp = dp, .ep = ep}; d.ranks() <= 8 && d.ranks() % ep == 0 && ep % tp == 0)
          out.push_back(d);
  for (const std::int64_t pp : {1, 2, 3})
    for (const std::int64_t cp : {1, 2, 4})
      for (const std::int64_t tp : {1, 2})
        for (const std::int64_t dp : {1, 2})
          if (const Degrees d{.tp = tp, .cp = cp, .pp = pp, .dp = dp}; cp * pp > 1 && d.ranks() <= 8) out.push_back(d);
  for (const Degrees& d : {Degrees{.cp = 2, .ep = 2},
                           {.cp = 4, .ep = 2},
                           {.cp = 2, .dp = 2, .ep = 2},
                           {.cp = 2, .dp = 2, .ep = 4},
                           {.cp = 3, .dp = 2, .ep = 2},
                           {.tp = 2, .cp = 2, .ep = 4},
                           {.pp = 2, .dp = 2, .ep = 2},
                           {.pp = 3, .dp = 2, .ep = 2},
                           {.cp = 2, .pp = 2, .ep = 2},
                           {.tp = 2, .pp = 2, .dp = 2, .ep = 4}})
    out.push_back(d);
  for (const Degrees& d : {Degrees{.dp = 2},
                           {.dp = 3},
                           {.dp = 8},
                           {.tp = 2, .dp = 3},
                           {.tp = 4, .dp = 2},
                           {.cp = 2},
                           {.cp = 2, .dp = 2},
                           {.pp = 2, .dp = 2},
                           {.pp = 3, .dp = 2},
                           {.tp = 2, .cp = 2, .dp = 2},
                           {.cp = 2, .pp = 2, .dp = 2},
                           {.dp = 4, .ep = 2},
                           {.dp = 4, .ep = 4},
                           {.tp = 2, .dp = 2, .ep = 2},
                           {.tp = 2, .dp = 4, .ep = 4}}) {
    out.push_back(d);
    out.back().full = true;
  }
  return out;
}

struct Layout {
  Degrees degrees;
  bool path_sharded = false;

  std::string name() const { return text_of_degrees(degrees) + (path_sharded ? ", path divided" : ""); }
  Case of(Case c) const {
    if (path_sharded) c.options.path_state = "divide";
    return c;
  }
};

std::vector<Layout> layouts() {
  std::vector<Layout> out;
  for (const Degrees& d : degrees_of_rows()) out.push_back({d});
  for (const Degrees& d : {Degrees{.cp = 2},
                           {.cp = 4},
                           {.tp = 2, .cp = 2},
                           {.cp = 2, .pp = 2},
                           {.cp = 2, .dp = 2},
                           {.tp = 2, .cp = 2, .pp = 2},
                           {.cp = 2, .pp = 3},
                           {.tp = 2, .cp = 2, .dp = 2},
                           {.cp = 2, .ep = 2},
                           {.cp = 4, .ep = 2},
                           {.cp = 2, .dp = 2, .ep = 4},
                           {.cp = 2, .pp = 2, .ep = 2},
                           {.cp = 2, .full = true},
                           {.cp = 2, .dp = 2, .full = true},
                           {.cp = 2, .pp = 2, .dp = 2, .full = true}})
    out.push_back({d, true});
  return out;
}

std::string cell(double error) {
  std::ostringstream out;
  out << std::scientific << std::setprecision(0) << error;
  return out.str();
}

TEST(LayoutTable, EveryLayoutGivesTheGradientOfOneProcess) {
  std::ostringstream table;
  std::vector<std::vector<Column>> models;
  table << "| layout |";
  for (const char* family : {"qwen3-odd", "qwen3-moe"}) {
    models.push_back(columns_of(family));
    for (const Column& column : models.back())
      table << ' ' << (models.size() == 1 ? "" : "MoE, ") << column.name << " |";
  }
  table << "\n| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n";
  std::vector<std::vector<Outcome>> alone(models.size());
  for (std::size_t model = 0; model < models.size(); ++model)
    for (const Column& column : models[model]) alone[model].push_back(run_case(column.c));
  double worst_of_all = 0;
  for (const Layout& layout : layouts()) {
    const Degrees& degrees = layout.degrees;
    table << "| " << layout.name() << " |";
    for (std::size_t model = 0; model < models.size(); ++model)
      for (std::size_t i = 0; i < models[model].size(); ++i) {
        const Column& column = models[model][i];
        if (degrees.ep > 1 && model == 0) {
          table << " |";
          continue;
        }
        const Worst worst =
            worst_parameter(column.c, run_layout(layout.of(column.c), degrees).gradient, alone[model][i].gradient);
        EXPECT_LE(worst.error, kFloat64) << layout.name() << ", " << column.name << ", " << worst.parameter;
        worst_of_all = std::max(worst_of_all, worst.error);
        table << ' ' << cell(worst.error) << " |";
      }
    table << '\n';
  }
  std::ofstream(ESPALIER_LAYOUT_TABLE) << table.str();
  std::cout << layouts().size() << " layouts, worst relative error " << cell(worst_of_all)
            << " (in full: " << ESPALIER_LAYOUT_TABLE << ")\n";
}

}  // namespace
}  // namespace espalier::testing
