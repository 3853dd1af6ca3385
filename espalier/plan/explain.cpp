// A plan as text for a person and as JSON for a program.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>

#include "espalier/base/error.h"
#include "espalier/base/json.h"
#include "espalier/base/units.h"
#include "espalier/program/running_order.h"
#include "espalier/program/step_plan.h"

namespace espalier {
namespace {

constexpr std::size_t kShownLines = 12;

std::string pad(const std::string& text, int width) {  // negative: to the left
  char out[256];
  std::snprintf(out, sizeof out, "%*s", width, text.c_str());
  return out;
}

std::string number_text(const char* format, double value) {
  char out[64];
  std::snprintf(out, sizeof out, format, value);
  return out;
}

std::string flops_text(double flops) {
  for (const auto& [scale, unit] : {std::pair(1e15, "PFLOP"), std::pair(1e12, "TFLOP"), std::pair(1e9, "GFLOP")})
    if (flops >= scale) return number_text("%.2f ", flops / scale) + unit;
  return number_text("%.2f MFLOP", flops / 1e6);
}

// Sum over waves of the part of the budget that their rows use: 1 for what cannot be divided and passes it.
double used_budgets(const std::vector<PlanItem>& items, std::int64_t budget) {
  double sum = 0;
  for (const PlanItem& item : items)
    sum += item.kind == ItemKind::wave ? std::min(1.0, static_cast<double>(item.set.rows) / static_cast<double>(budget))
                                       : used_budgets(item.below, budget);
  return sum;
}

double mean_fill(const StepPlan& plan) {
  return plan.waves == 0 ? 0 : used_budgets(plan.items, plan.token_budget) / static_cast<double>(plan.waves);
}

bool alike(const TreePlan& a, const TreePlan& b) {
  return a.rollouts == b.rollouts && a.schedule == b.schedule && a.trunks == b.trunks && a.waves == b.waves &&
         a.physical_rows == b.physical_rows && a.logical_rows == b.logical_rows && a.reason == b.reason;
}

// Trees in order, runs of like ones in one line.
std::string trees_table(const StepPlan& plan) {
  std::string out = pad("tree", 11) + pad("rollouts", 10) + "  " + pad("schedule", -10) + pad("trunks", 8) +
                    pad("waves", 7) + pad("rows", 13) + pad("of", 13) + "  why\n";
  std::size_t lines = 0, begin = 0;
  while (begin < plan.trees.size() && lines < kShownLines) {
    const TreePlan& tree = plan.trees[begin];
    const std::string text = pad(format_count(tree.rollouts), 10) + "  " + pad(name_of(tree.schedule), -10) +
                             pad(format_count(tree.trunks), 8) + pad(format_count(tree.waves), 7) +
                             pad(format_count(tree.physical_rows), 13) + pad(format_count(tree.logical_rows), 13);
    std::size_t end = begin + 1;
    while (end < plan.trees.size() && alike(plan.trees[end], tree)) ++end;
    out += pad(end == begin + 1 ? text_of(begin) : text_of(begin, "-", end - 1), 11) + text + "  " + tree.reason + "\n";
    begin = end, ++lines;
  }
  if (begin < plan.trees.size()) out += text_of("   ... and ", format_count(plan.trees.size() - begin), " more\n");
  return out;
}

std::string costs_table(const StepPlan& plan) {
  std::string out =
      pad("", -10) + pad("work", 16) + pad("time", 14) + pad("A", 12) + pad("B", 12) + pad("C", 12) + "\n";
  const auto line = [&](const char* name, const PlanCost& cost) {
    const auto bytes = [](std::int64_t value) { return value ? format_bytes(value) : std::string("-"); };
    out += pad(name, -10) + pad(flops_text(cost.flops), 16) + pad(format_seconds(cost.seconds), 14) +
           pad(bytes(cost.bytes.a), 12) + pad(bytes(cost.bytes.b), 12) + pad(bytes(cost.bytes.c), 12) +
           (cost.fits ? "" : "  does not fit") + "\n";
  };
  line("dense", plan.dense);
  line("packed", plan.packed);
  line("phased", plan.phased);
  line("chosen", plan.chosen);
  return out;
}

std::string states_text(const StepPlan& plan) {
  std::string out;
  for (const auto& [kind, name] : {std::pair(ItemKind::trunk, "trunks"), {ItemKind::wave, "waves"}}) {
    std::map<std::string, std::int64_t> counts;
    count_states(plan.items, kind, counts);
    for (const auto& [state, count] : counts)
      out += text_of(out.empty() ? "" : "; ", format_count(count), ' ', name, ' ', state);
  }
  if (out.empty()) return out;
  const std::int64_t stored = plan.chosen.stored_bytes;
  return text_of("State between forward and backward: ", out,
                 stored > 0 ? text_of("; at most ", format_bytes(stored), " offloaded") : "", "\n");
}

std::string path_text(const StepPlan& plan) {
  if (plan.path.state() == PathState::keep) return "";
  const std::string computed = "latents, from which each layer's keys and values are computed while it is in use";
  if (!plan.path.sleeps()) return text_of("Path: ", computed, "\n");
  const std::string what =
      plan.path.latents ? "latents and their gradients are " : "keys, values and their gradients are ";
  const std::string where = plan.path.sharded
                                ? what + "sharded over cp"
                                : text_of(format_bytes(plan.chosen.path_stored_bytes), " of ", what, "offloaded");
  const std::int32_t awake = plan.path.layers_awake;
  return text_of("Path: ", where, " while their layer is not in use",
                 awake > 0 ? text_of("; ", awake, awake == 1 ? " layer stays" : " layers stay") : "",
                 plan.path.latents ? text_of("\nPath: ", computed) : "", "\n");
}

// The plans that were tried before one fitted, and what each would cost.
std::string tried_text(const StepPlan& plan) {
  std::string out;
  for (const TriedPlan& tried : plan.tried)
    out += text_of("  ", pad(tried.what, -104), pad(format_seconds(tried.cost.seconds), 12),
                   pad(format_bytes(tried.cost.bytes.peak()), 12), tried.cost.fits ? "" : "  does not fit", "\n");
  return out.empty() ? out : "\nTried to fit the budget: predicted time, peak bytes\n" + out;
}

// One line of text for each depth of nesting; boxes as wide as the predicted time.
class Timeline {
 public:
  explicit Timeline(double seconds) : columns_per_second_(70 / std::max(seconds, 1e-12)) {}

  void add(const RunEntry& entry) {
    const auto level = static_cast<std::size_t>(entry.level);
    if (level >= kDeepest || at_ > kWidest) return;
    if (lines_.size() <= level) lines_.resize(level + 1);
    std::string& line = lines_[level];
    line.resize(at_, ' ');
    const std::size_t width =
        std::max<std::size_t>(3, static_cast<std::size_t>(std::lround(entry.seconds * columns_per_second_)));
    if (at_ + width > kWidest) {
      line += "...";
      at_ = kWidest + 1;
      return;
    }
    line += "[" + std::string(width - 2, entry.phase) + "]";
    at_ += width;
  }

  std::string text() const {
    std::string out;
    for (const std::string& line : lines_) out += "  " + line + "\n";
    return out;
  }

  static constexpr std::size_t kWidest = 100, kDeepest = 8;

 private:
  double columns_per_second_;
  std::size_t at_ = 0;
  std::vector<std::string> lines_;
};

double total_seconds(const PlanItem& item) {
  double seconds = item.seconds;
  for (const PlanItem& below : item.below) seconds += total_seconds(below);
  return seconds;
}

std::string picture(const StepPlan& plan) {
  if (plan.items.empty()) return "";
  const auto trunk = std::find_if(plan.items.begin(), plan.items.end(),
                                  [](const PlanItem& item) { return item.kind == ItemKind::trunk; });
  const PlanItem& item = trunk != plan.items.end() ? *trunk : plan.items.front();
  Timeline timeline(total_seconds(item));
  // An entry takes three columns at least, so more of them would not fit.
  for (const RunEntry& entry : running_order({&item, 1}, Timeline::kWidest)) timeline.add(entry);
  return text_of(item.kind == ItemKind::trunk ? "First trunk" : "First wave",
                 ", predicted time from left to right (A trunk forward, B wave, C trunk backward)\n", timeline.text());
}

Json cost_json(const PlanCost& cost) {
  return {{"seconds", cost.seconds},
          {"peak_bytes", {{"A", cost.bytes.a}, {"B", cost.bytes.b}, {"C", cost.bytes.c}}},
          {"stored_bytes", cost.all_stored()},
          {"path_stored_bytes", cost.path_stored_bytes},
          {"fits", cost.fits}};
}

}  // namespace

std::string explain(const StepPlan& plan) {
  std::int64_t rollouts = 0;
  for (const TreePlan& tree : plan.trees) rollouts += tree.rollouts;
  std::string out =
      text_of(format_count(rollouts), " rollouts in ", format_count(plan.trees.size()),
              plan.trees.size() == 1 ? " prefix tree: " : " prefix trees: ", format_count(plan.logical_rows),
              " rows dense, ", format_count(plan.physical_rows()), " to run: ", format_count(plan.trunks), " trunks (",
              format_count(plan.trunk_rows), " rows), ", format_count(plan.waves), " waves (",
              format_count(plan.wave_rows), " rows)\n\n");
  out += trees_table(plan) + "\n";
  if (plan.waves > 0)
    out += text_of("Budget of ", format_count(plan.token_budget), " rows a wave (",
                   plan.budget_given ? "as asked for" : "chosen; indivisible rows may exceed it", "), largest set ",
                   format_count(plan.max_rows), " rows, waves ", number_text("%.0f", 100 * mean_fill(plan)),
                   "% full on average; longest open path ", format_count(plan.max_path_rows), " rows",
                   plan.max_window_rows > 0 && plan.max_window_rows < plan.max_path_rows
                       ? text_of(", of which layers with a window keep ", format_count(plan.max_window_rows))
                       : std::string(),
                   "\n");
  out += text_of("Ceiling (FLOPs dense / FLOPs with every shared row once): ", number_text("%.2f", plan.ceiling),
                 "; this plan: ", number_text("%.2f", plan.dense.flops / std::max(plan.chosen.flops, 1.0)), "\n");
  if (plan.memory_budget > 0) out += text_of("Memory budget ", format_bytes(plan.memory_budget), "\n");
  out += states_text(plan) + path_text(plan) + tried_text(plan);
  out += "\nPredicted; A, B, C: peak bytes of trunk forwards, waves, trunk backwards\n" + costs_table(plan) + "\n";
  out += picture(plan);
  return out + "\nMachine: " + plan.machine + "\n";
}

Json to_json(const StepPlan& plan) {
  Json trees = Json::array();
  for (const TreePlan& tree : plan.trees)
    trees.push_back({{"schedule", name_of(tree.schedule)},
                     {"rollouts", tree.rollouts},
                     {"trunks", tree.trunks},
                     {"waves", tree.waves},
                     {"rows", {{"logical", tree.logical_rows}, {"physical", tree.physical_rows}}},
                     {"reason", tree.reason}});
  return {{"trees", std::move(trees)},
          {"trunks", plan.trunks},
          {"waves", plan.waves},
          {"rows",
           {{"logical", plan.logical_rows},
            {"physical", plan.physical_rows()},
            {"trunk", plan.trunk_rows},
            {"wave", plan.wave_rows}}},
          {"token_budget", plan.token_budget},
          {"fill", mean_fill(plan)},
          {"max_path_rows", plan.max_path_rows},
          {"max_window_rows", plan.max_window_rows},
          {"path_state", name_of(plan.path.state())},
          {"flops",
           {{"dense", plan.dense.flops},
            {"packed", plan.packed.flops},
            {"phased", plan.phased.flops},
            {"chosen", plan.chosen.flops}}},
          {"ceiling", plan.ceiling},
          {"predicted",
           {{"dense", cost_json(plan.dense)},
            {"packed", cost_json(plan.packed)},
            {"phased", cost_json(plan.phased)},
            {"chosen", cost_json(plan.chosen)}}},
          {"machine", plan.machine}};
}

}  // namespace espalier
