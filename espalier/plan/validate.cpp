// The rules of step_plan.h, checked from the outside: nothing here knows how a plan is made.
#include <algorithm>
#include <tuple>

#include "espalier/base/error.h"
#include "espalier/forecast/flops.h"
#include "espalier/program/step_plan.h"

namespace espalier {
namespace {

class Validator {
 public:
  Validator(const StepPlan& plan, std::span<const Rollout> rollouts)
      : plan_(plan),
        rollouts_(rollouts),
        covered_(rollouts.size(), 0),
        edges_(rollouts.size(), 0),
        seen_(rollouts.size(), 0),
        finished_(rollouts.size(), 0),
        in_set_(rollouts.size(), -1),
        expected_(rollouts.size(), 0) {
    for (std::size_t r = 0; r < rollouts.size(); ++r)
      for (std::int32_t t = 0; t < rollouts[r].targets(); ++t) expected_[r] += wanted(rollouts[r], t);
  }

  void run() {
    for (std::size_t i = 0; i < plan_.items.size(); ++i) item(plan_.items[i], {}, text_of("item ", i));
    std::int64_t logical = 0;
    for (std::size_t r = 0; r < rollouts_.size(); ++r) {
      logical += rollouts_[r].length();
      const std::int64_t expected = expected_[r];
      if (covered_[r] != rollouts_[r].length())
        fail("the plan", "rollout ", r, ": ", covered_[r], " of ", rollouts_[r].length(), " rows");
      if (edges_[r] != expected) fail("the plan", "rollout ", r, ": ", edges_[r], " of ", expected, " edges");
      if (finished_[r] != (expected > 0)) fail("the plan", "rollout ", r, " finished ", int{finished_[r]}, " times");
    }
    same("logical rows", plan_.logical_rows, logical);
    same("rows times multiplicity", weighted_, logical);
    same("trunk rows", plan_.trunk_rows, trunk_rows_);
    same("wave rows", plan_.wave_rows, wave_rows_);
    same("trunks", plan_.trunks, trunks_);
    same("waves", plan_.waves, waves_);
    same("max path rows", plan_.max_path_rows, max_path_.all);
    same("max rows of windows", plan_.max_window_rows, max_path_.window);
    same("max rows", plan_.max_rows, max_rows_);
    std::int64_t physical = 0, rollouts = 0;
    for (const TreePlan& tree : plan_.trees) physical += tree.physical_rows, rollouts += tree.rollouts;
    same("rows of the trees", physical, trunk_rows_ + wave_rows_);
    same("rollouts of the trees", rollouts, static_cast<std::int64_t>(rollouts_.size()));
  }

 private:
  template <class... Parts>
  [[noreturn]] static void fail(const std::string& where, const Parts&... parts) {
    throw InternalError({where, "a valid plan", text_of(parts...), "please report this"});
  }
  static void same(const char* what, std::int64_t got, std::int64_t expected) {
    if (got != expected) fail("the plan", what, ": ", got, " instead of ", expected);
  }

  bool wanted(const Rollout& rollout, std::int32_t position) const {
    return plan_.all_logprobs || rollout.loss_mask[position] != 0;
  }

  static bool predicts(const Rollout& rollout, std::int32_t depth, const LossEdge& edge) {
    if (const GivenTargets& given = rollout.given_targets; given.columns > 0)
      return edge.position / given.columns == depth &&
             edge.target == given.ids[static_cast<std::size_t>(edge.position)];
    return depth == rollout.prompt_length() + edge.position - 1 && edge.target == rollout.token_at(depth + 1);
  }

  void item(const PlanItem& item, PathRows path, const std::string& where) {
    const bool trunk = item.kind == ItemKind::trunk;
    if (item.path_rows != path.all) fail(where, "path of ", item.path_rows, " rows, ", path.all, " are open");
    if (item.set.rows < 1) fail(where, "no rows");
    if (trunk == item.below.empty()) fail(where, trunk ? "a trunk with nothing below" : "a wave with items below");
    if (plan_.budget_given && item.set.rows > std::max<std::int64_t>(plan_.token_budget, 2))
      fail(where, item.set.rows, " rows, above the budget of ", plan_.token_budget);
    (trunk ? trunk_rows_ : wave_rows_) += item.set.rows;
    (trunk ? trunks_ : waves_) += 1;
    max_rows_ = std::max<std::int64_t>(max_rows_, item.set.rows);
    segments(item, where);
    edges(item, where);
    if (!trunk) return;
    const std::int64_t end = path.all + item.set.rows;
    path = {end, path.window + window_rows_kept(path.all, end, plan_.window)};
    max_path_ = {std::max(max_path_.all, path.all), std::max(max_path_.window, path.window)};
    // Everything below sees all rows of the trunk, so they must be one path that all below have.
    for (const RowSegment& segment : item.set.segments)
      if (segment.subtree_end != item.set.rows) fail(where, "a trunk that branches at row ", segment.row);
    for (std::size_t i = 0; i < item.below.size(); ++i) {
      const std::string inner = text_of(where, ".", i);
      for (std::int32_t r : item.below[i].set.rollouts)
        if (std::find(item.set.rollouts.begin(), item.set.rollouts.end(), r) == item.set.rollouts.end())
          fail(inner, "rollout ", r, " is not in the trunk above");
      this->item(item.below[i], path, inner);
    }
  }

  void segments(const PlanItem& item, const std::string& where) {
    const RowSet& set = item.set;
    for (std::int32_t r : set.rollouts) {
      if (r < 0 || r >= static_cast<std::int32_t>(rollouts_.size())) fail(where, "rollout ", r, " does not exist");
      if (in_set_[r] == sets_) fail(where, "rollout ", r, " twice");
      in_set_[r] = sets_;
    }
    ++sets_;
    std::int32_t row = 0;
    std::vector<const RowSegment*> above;  // segments whose rows this one sees
    for (const RowSegment& segment : set.segments) {
      const std::string at = text_of(where, " row ", segment.row);
      if (segment.row != row || segment.end <= segment.begin) fail(at, "segments with a gap or without rows");
      row += segment.end - segment.begin;
      while (!above.empty() && above.back()->subtree_end <= segment.row) above.pop_back();
      if (segment.subtree_end < row || segment.subtree_end > set.rows)
        fail(at, "subtree ends at ", segment.subtree_end);
      if (!above.empty() && segment.subtree_end > above.back()->subtree_end) fail(at, "subtrees that overlap");
      if (segment.first < 0 || segment.last > static_cast<std::int32_t>(set.rollouts.size()) ||
          segment.last - segment.first != segment.multiplicity || segment.multiplicity < 1)
        fail(at, "multiplicity ", segment.multiplicity);
      if (!above.empty() && (segment.first < above.back()->first || segment.last > above.back()->last))
        fail(at, "rollouts that do not pass the segment above");
      // The segments above follow each other without gaps, as each was checked here in turn.
      const std::int32_t visible = item.path_rows + (above.empty() ? 0 : above.back()->end - above.front()->begin);
      if (segment.begin != visible) fail(at, "begins at depth ", segment.begin, ", sees ", visible, " rows");
      tokens(segment, set, at);
      weighted_ += static_cast<std::int64_t>(segment.multiplicity) * (segment.end - segment.begin);
      above.push_back(&segment);
    }
    if (row != set.rows) fail(where, "segments of ", row, " rows instead of ", set.rows);
  }

  void tokens(const RowSegment& segment, const RowSet& set, const std::string& where) {
    bool names_one = false;
    for (std::int32_t i = segment.first; i < segment.last; ++i) {
      const std::int32_t r = set.rollouts[i];
      names_one |= r == segment.rollout;
      if (covered_[r] != segment.begin)
        fail(where, "rollout ", r, " has rows up to ", covered_[r], ", not ", segment.begin);
      if (segment.end > rollouts_[r].length()) fail(where, "rollout ", r, " is shorter than ", segment.end);
      for (std::int32_t depth = segment.begin; depth < segment.end; ++depth)
        if (rollouts_[r].token_at(depth) != rollouts_[segment.rollout].token_at(depth) ||
            !std::ranges::equal(rollouts_[r].experts_at(depth), rollouts_[segment.rollout].experts_at(depth)))
          fail(where, "rollout ", r, " has another token at depth ", depth);
      covered_[r] = segment.end;
    }
    if (!names_one) fail(where, "rollout ", segment.rollout, " does not pass its own segment");
  }

  void edges(const PlanItem& item, const std::string& where) {
    const std::vector<LossEdge> edges = edges_of(item.set, rollouts_, plan_.all_logprobs);
    std::vector<std::int32_t> finished;
    std::size_t s = 0;
    for (std::size_t i = 0; i < edges.size(); ++i) {
      const LossEdge& edge = edges[i];
      const std::string at = text_of(where, " row ", edge.row);
      const auto place = [](const LossEdge& e) { return std::tuple(e.row, e.rollout, e.position); };
      if (i > 0 && place(edges[i - 1]) >= place(edge)) fail(at, "edges out of order");
      while (s + 1 < item.set.segments.size() && item.set.segments[s + 1].row <= edge.row) ++s;
      const RowSegment& segment = item.set.segments[s];
      const auto first = item.set.rollouts.begin() + segment.first, last = item.set.rollouts.begin() + segment.last;
      if (std::find(first, last, edge.rollout) == last) fail(at, "rollout ", edge.rollout, " does not pass here");
      const Rollout& rollout = rollouts_[edge.rollout];
      const std::int32_t depth = segment.begin + edge.row - segment.row;
      if (edge.position < 0 || edge.position >= rollout.targets() || !predicts(rollout, depth, edge))
        fail(at, "an edge to position ", edge.position, " of rollout ", edge.rollout);
      // Positions of a rollout come in order along its path, so a repeated one would not ascend.
      if (edge.position < seen_[edge.rollout] || !wanted(rollout, edge.position))
        fail(at, "edge ", edge.position, " of rollout ", edge.rollout, " again or unwanted");
      seen_[edge.rollout] = edge.position + 1;
      if (++edges_[edge.rollout] == expected_[edge.rollout]) finished.push_back(edge.rollout);
    }
    std::int64_t pairs = 0, output_pairs = 0, window_pairs = 0, window_output_pairs = 0;
    for (const RowSegment& segment : item.set.segments)
      for (std::int64_t depth = segment.begin; depth < segment.end; ++depth)
        pairs += depth + 1, window_pairs += pairs_in_window(depth, plan_.window);
    s = 0;
    const std::vector<LossEdge> outputs = outputs_of(edges, rollouts_, plan_.by_temperature);
    for (const LossEdge& output : outputs) {
      while (s + 1 < item.set.segments.size() && item.set.segments[s + 1].row <= output.row) ++s;
      const std::int64_t depth = item.set.segments[s].begin + output.row - item.set.segments[s].row;
      output_pairs += depth + 1, window_output_pairs += pairs_in_window(depth, plan_.window);
    }
    if (pairs != item.set.pairs || output_pairs != item.set.output_pairs)
      fail(where, item.set.pairs, " and ", item.set.output_pairs, " pairs instead of ", pairs, " and ", output_pairs);
    if (window_pairs != item.set.window_pairs || window_output_pairs != item.set.window_output_pairs)
      fail(where, item.set.window_pairs, " and ", item.set.window_output_pairs, " pairs in windows instead of ",
           window_pairs, " and ", window_output_pairs);
    const std::vector<RowRun> runs = runs_of(item.set);
    const std::int64_t forks = std::ranges::count_if(runs, [](const RowRun& run) { return run.fork >= 0; });
    if (forks != item.set.forks) fail(where, item.set.forks, " forks instead of ", forks);
    if (std::ssize(outputs) != item.set.outputs) fail(where, outputs.size(), " outputs instead of ", item.set.outputs);
    std::vector<std::int32_t> stated = item.finished;
    std::sort(stated.begin(), stated.end());
    std::sort(finished.begin(), finished.end());
    if (stated != finished) fail(where, stated.size(), " rollouts finished instead of ", finished.size());
    for (std::int32_t r : finished) ++finished_[r];
  }

  const StepPlan& plan_;
  std::span<const Rollout> rollouts_;
  std::vector<std::int32_t> covered_;  // depth up to which a rollout has rows
  std::vector<std::int64_t> edges_;
  std::vector<std::int32_t> seen_;  // one past its last edge's position
  std::vector<std::uint8_t> finished_;
  std::vector<std::int64_t> in_set_;    // the last set that a rollout was in
  std::vector<std::int64_t> expected_;  // edges of a rollout
  std::int64_t sets_ = 0, weighted_ = 0, trunk_rows_ = 0, wave_rows_ = 0, trunks_ = 0, waves_ = 0;
  PathRows max_path_;
  std::int64_t max_rows_ = 0;
};

}  // namespace

void validate(const StepPlan& plan, std::span<const Rollout> rollouts) { Validator(plan, rollouts).run(); }

}  // namespace espalier
