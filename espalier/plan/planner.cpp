// Candidates, the choice among them, and the plan written out.
#include "espalier/plan/planner.h"
#include "espalier/options/memory_budget.h"
#include "espalier/shape/path_leaves.h"

#include <algorithm>
#include <limits>
#include <set>
#include <utility>

#include "espalier/base/error.h"
#include "espalier/base/units.h"
#include "espalier/forecast/communication.h"
#include "espalier/plan/layout.h"
#include "espalier/plan/state_choice.h"

namespace espalier {
namespace {

constexpr std::int64_t kLargestWave = 16384;   // rows
constexpr std::int64_t kMostExpertShare = 4;   // times that many where a row goes to few of many experts
constexpr std::int64_t kMostShardedShare = 8;  // and where every wave brings sharded weights together

struct Candidate {
  LayoutResult layout;
  LayoutOptions options;
  PlanCost cost;
  double together_seconds = 0;  // of bringing together sharded weights, and a sharded path, beside the cost's
  double seconds() const { return cost.seconds + together_seconds; }
  PathPlan path;
  bool undegraded = false;  // everything is as it is where memory is plenty
  std::vector<TriedPlan> tried;
};

// Everything that stays the same while candidates are tried.
class Search {
 public:
  Search(std::span<const Rollout> rollouts, const std::vector<PrefixTree>& trees, const LocalShape& shape,
         const PlanOptions& options, const MachineProfile& profile)
      : options_(options),
        cp_(shape.degrees().cp),
        edges_(rollouts, options.all_logprobs, !shape.whole().value_head, shape.whole().window()),
        model_(shape, profile, options.dtype, options.kind, options.setting),
        whole_(shape.whole(), profile, options.dtype, options.kind, options.setting),
        bytes_(shape, options.dtype, options.kind, options.setting),
        large_rows_(profile.large_rows()),
        communication_(shape, options.dtype, options.kind, profile),
        item_seconds_(communication_.seconds_of_units()),
        states_(model_, bytes_, options) {
    if (item_seconds_ > 0) largest_wave_ *= kMostShardedShare;
    if (const ModelShape& whole = shape.whole(); whole.experts > 0)
      largest_wave_ *= std::clamp<std::int64_t>(whole.experts / whole.experts_per_token, 1, kMostExpertShare);
    std::vector<std::int32_t> place(rollouts.size());
    forest_.reserve(trees.size());
    for (const PrefixTree& tree : trees) forest_.emplace_back(tree, edges_, place);
    for (const Rollout& rollout : rollouts) longest_ = std::max(longest_, rollout.length());
  }

  // The cheapest candidate under a schedule (automatic: decided tree by tree) that fits; if none does, the one that
  // needs least.
  Candidate best(Schedule schedule) const;
  double dense_flops() const;
  double ideal_flops() const;
  // True if `a` is better: it alone fits, or both fit and it is faster, or neither fits and it is smaller.
  static bool better(const Candidate& a, const Candidate& b);

  const Forest& forest() const { return forest_; }
  const EdgeIndex& edges() const { return edges_; }
  const CostModel& model() const { return model_; }
  const ActivationBytes& bytes() const { return bytes_; }

 private:
  Candidate build(Schedule schedule, const LayoutOptions& options) const;
  void evaluate(Candidate& candidate) const;
  // Held besides the path and what a walk over the items finds.
  std::int64_t base_bytes(const DraftCost& cost) const {
    return bytes_.constant() + bytes_.scratch(cost.max_rows, cost.max_path.all, model_.threads());
  }
  bool path_may_be_sharded() const { return options_.path_state == PathState::automatic && cp_ > 1; }
  bool path_may_be_latents() const {
    return options_.path_state == PathState::automatic && may_carry_latents(bytes_.shape());
  }
  bool path_may_be_stored() const {
    return options_.path_state == PathState::automatic && options_.spill_room > 0 &&
           (options_.trunk_state == SavedState::automatic || options_.trunk_state == SavedState::offload);
  }
  // Chooses the states of trunks and waves beside such a path.
  void choose_states(Candidate& candidate, const PathPlan& path) const;
  // The same beside a path that sleeps, with as many layers awake as fit.
  void choose_with_sleeping_path(Candidate& candidate, const PathPlan& path) const;
  // Seconds in which ranks of cp exchange a sharded path, if the items ran one after another.
  double path_seconds(const std::vector<Draft>& items, const PathPlan& path) const;
  // At one budget: everything as it is where memory is plenty, or where that does not fit the cheapest states that do.
  Candidate at_budget(Schedule schedule, std::int64_t budget, bool soft, std::vector<TriedPlan>& tried) const;

  PlanOptions options_;
  std::int64_t cp_;
  EdgeIndex edges_;
  CostModel model_, whole_;  // of the rank; of the whole model
  ActivationBytes bytes_;
  std::int64_t large_rows_, largest_wave_ = kLargestWave;
  Communication communication_;
  double item_seconds_;  // what every item takes beside its own
  std::int32_t longest_ = 0;
  Forest forest_;
  StateChoice states_;
};

// Where an option puts the path; `automatic`: in memory. No layer stays there where layers sleep.
PathPlan path_of(PathState state, std::int64_t cp) {
  PathPlan path;
  path.latents =
      state == PathState::latents || state == PathState::latents_offload || state == PathState::latents_divide;
  path.sharded = (state == PathState::divide || state == PathState::latents_divide) && cp > 1;
  if (path.sharded || state == PathState::offload || state == PathState::latents_offload) path.layers_awake = 0;
  return path;
}

Candidate Search::build(Schedule schedule, const LayoutOptions& options) const {
  Candidate candidate;
  candidate.options = options;
  const Layout layout(forest_, edges_, model_, options);
  for (std::int32_t tree = 0; tree < static_cast<std::int32_t>(forest_.size()); ++tree) {
    switch (schedule) {
      case Schedule::automatic:
      case Schedule::phased:
        layout.add_shared(tree, candidate.layout);
        break;
      case Schedule::packed:
        layout.add_packed(tree, candidate.layout);
        break;
      case Schedule::dense:
        layout.add_dense(tree, candidate.layout);
        break;
    }
  }
  layout.pack_loose(candidate.layout);
  for (Draft& item : candidate.layout.items) {
    set_trunk_states(item, states_.of_trunks().front());
    set_wave_states(item, states_.of_waves().front());
  }
  candidate.path = path_of(options_.path_state, cp_);
  evaluate(candidate);
  return candidate;
}

void Search::evaluate(Candidate& candidate) const {
  PeakWalk walk(bytes_);
  walk.run(program_of(candidate.layout.items, bytes_.waves_in_flight()));
  DraftCost cost;
  for (const Draft& item : candidate.layout.items) add_cost(item, model_, cost, candidate.path);
  const PathBytes path = bytes_.path(cost.max_path, candidate.path);
  if (!path.sleeps) candidate.path = {.latents = candidate.path.latents && cost.max_path.all > 0};
  candidate.cost.flops = cost.flops;
  candidate.cost.seconds = cost.seconds;
  candidate.together_seconds = item_seconds_ * static_cast<double>(cost.items);
  if (candidate.path.sharded) candidate.together_seconds += path_seconds(candidate.layout.items, candidate.path);
  candidate.cost.bytes =
      walk.peaks(base_bytes(cost) + bytes_.in_flight(walk.stored()) + bytes_.in_flight(path.stored), path);
  candidate.cost.stored_bytes = walk.stored();
  candidate.cost.path_stored_bytes = path.stored;
  candidate.cost.fits = options_.memory_budget == 0 || candidate.cost.bytes.peak() <= options_.memory_budget;
}

double Search::path_seconds(const std::vector<Draft>& items, const PathPlan& path) const {
  double sum = 0;
  for (const Draft& item : items) {
    const std::int64_t own = item.kind == ItemKind::trunk ? item.work.rows : 0;
    sum += communication_.seconds_of_path(item.path_rows, own, path) + path_seconds(item.below, path);
  }
  return sum;
}

bool Search::better(const Candidate& a, const Candidate& b) {
  if (a.cost.fits != b.cost.fits) return a.cost.fits;
  return a.cost.fits ? a.seconds() < b.seconds() : a.cost.bytes.peak() < b.cost.bytes.peak();
}

Candidate Search::at_budget(Schedule schedule, std::int64_t budget, bool soft, std::vector<TriedPlan>& tried) const {
  const bool phased = schedule == Schedule::phased;
  const auto note = [&](const Candidate& candidate) {
    const TriedPlan made{
        text_of("waves of ", budget, " rows", states_text(candidate.layout.items), path_text(candidate.path)),
        candidate.cost};
    const auto same = [&](const TriedPlan& before) {
      return before.what == made.what && before.cost.seconds == made.cost.seconds &&
             before.cost.bytes.peak() == made.cost.bytes.peak();
    };
    if (std::ranges::none_of(tried, same)) tried.push_back(made);  // a soft limit often makes what a hard one does
  };
  const auto built = [&](ItemState trunk_state) {
    return build(schedule, {budget, soft, trunk_state, phased, cp_, item_seconds_});
  };
  Candidate best = built(states_.of_trunks().front());
  best.undegraded = true;
  note(best);
  if (best.cost.fits || !(states_.any() || path_may_be_latents() || path_may_be_sharded() || path_may_be_stored()))
    return best;
  // A trunk that is not kept pays less.
  Candidate other =
      built(states_.of_trunks().size() > 1 ? ItemState(SavedState::recompute) : states_.of_trunks().front());
  const auto weigh = [&](const Candidate& candidate) {
    note(candidate);
    if (better(candidate, best)) best = candidate;
  };
  choose_states(other, other.path);
  weigh(other);
  if (path_may_be_latents()) {
    choose_states(other, {.latents = true});
    if (other.path.latents) weigh(other);  // else there is no path
  }
  for (const bool latents : {false, true}) {
    if (latents && !path_may_be_latents()) break;
    if (path_may_be_sharded()) {
      choose_with_sleeping_path(other, {0, true, latents});
      if (other.path.sharded) weigh(other);
    }
    if (path_may_be_stored()) {
      choose_with_sleeping_path(other, {0, false, latents});
      if (other.cost.path_stored_bytes > 0 && other.cost.all_stored() <= options_.spill_room) weigh(other);
    }
  }
  return best;
}

void Search::choose_states(Candidate& candidate, const PathPlan& chosen) const {
  DraftCost all;
  for (const Draft& item : candidate.layout.items) add_cost(item, model_, all);
  const PathBytes path = bytes_.path(all.max_path, chosen);
  states_.choose(candidate.layout.items,
                 options_.memory_budget - base_bytes(all) - path.backward - bytes_.in_flight(path.stored));
  candidate.path = chosen;
  evaluate(candidate);
}

void Search::choose_with_sleeping_path(Candidate& candidate, const PathPlan& path) const {
  choose_states(candidate, path);
  if (!candidate.path.sleeps() || !candidate.cost.fits) return;
  // The bytes left over keep layers awake, as many as still fit.
  std::int32_t fits = 0, fails = static_cast<std::int32_t>(bytes_.layers()) - 1;  // a last layer would not sleep
  while (fails - fits > 1) {
    const std::int32_t middle = fits + (fails - fits) / 2;
    candidate.path.layers_awake = middle;
    evaluate(candidate);
    (candidate.cost.fits ? fits : fails) = middle;
  }
  candidate.path.layers_awake = fits;
  evaluate(candidate);
}

Candidate Search::best(Schedule schedule) const {
  std::vector<TriedPlan> tried;
  const auto done = [&](Candidate candidate) {
    if (tried.size() > 1 && !tried.front().cost.fits) candidate.tried = std::move(tried);
    return candidate;
  };
  if (options_.token_budget > 0) return done(at_budget(schedule, options_.token_budget, false, tried));
  const std::int64_t smallest = std::clamp<std::int64_t>(large_rows_, 2048, 8192);
  Candidate best = at_budget(schedule, smallest, true, tried);
  // Fewer items may be worth computing activations again.
  const auto is_wanted = [&](const Candidate& one) { return one.cost.fits && (one.undegraded || item_seconds_ > 0); };
  for (std::int64_t budget = 2 * smallest; budget <= largest_wave_ && is_wanted(best); budget *= 2) {
    Candidate larger = at_budget(schedule, budget, true, tried);
    // A larger wave must earn its memory.
    if (is_wanted(larger) && larger.seconds() < 0.995 * best.seconds()) best = std::move(larger);
  }
  if (best.undegraded && best.cost.fits) return done(std::move(best));
  // Smaller waves, as long as they may be cheaper than what fits so far.
  for (std::int64_t budget = 4 * smallest; budget >= 32 && longest_ / budget < 1000; budget /= 2) {
    Candidate smaller = at_budget(schedule, budget, false, tried);
    const bool last = smaller.undegraded && smaller.cost.fits;
    if (better(smaller, best)) best = std::move(smaller);
    if (last || (best.cost.fits && best.seconds() < 0.8 * smaller.seconds())) break;
  }
  return done(std::move(best));
}

double Search::dense_flops() const {
  double sum = 0;
  for (const TreeIndex& tree : forest_)
    for (std::int32_t leaf = 0; leaf < tree.leaves(); ++leaf)
      sum += whole_.flops(tree.work_of_leaf(leaf, 0, tree.leaf_length(leaf)), SavedState::keep);
  return sum;
}

double Search::ideal_flops() const {
  double sum = 0;
  for (const TreeIndex& tree : forest_) sum += whole_.flops(tree.subtree(0), SavedState::keep);
  return sum;
}

// Totals and the trees' rows, trunks and waves, from the items.
class Tally {
 public:
  Tally(const Forest& forest, std::size_t rollouts, StepPlan& plan) : plan_(plan), tree_of_(rollouts) {
    plan.trees.resize(forest.size());
    shared_.resize(forest.size());
    for (std::size_t tree = 0; tree < forest.size(); ++tree) {
      TreePlan& out = plan.trees[tree];
      out.rollouts = forest[tree].leaves();
      for (std::int32_t leaf = 0; leaf < forest[tree].leaves(); ++leaf)
        out.logical_rows += forest[tree].leaf_length(leaf);
      for (std::int32_t rollout : forest[tree].rollouts(0, forest[tree].leaves()))
        tree_of_[rollout] = static_cast<std::int32_t>(tree);
      plan.logical_rows += out.logical_rows;
    }
  }

  void add(const PlanItem& item, std::int64_t window_rows = 0) {
    const bool trunk = item.kind == ItemKind::trunk;
    (trunk ? plan_.trunks : plan_.waves) += 1;
    (trunk ? plan_.trunk_rows : plan_.wave_rows) += item.set.rows;
    plan_.max_rows = std::max(plan_.max_rows, item.set.rows);
    if (trunk) {
      window_rows += window_rows_kept(item.path_rows, item.path_rows + item.set.rows, plan_.window);
      plan_.max_path_rows = std::max(plan_.max_path_rows, item.path_rows + item.set.rows);
      plan_.max_window_rows = std::max(plan_.max_window_rows, window_rows);
    }
    std::int32_t before = -1;
    std::set<std::int32_t> seen;
    for (const RowSegment& segment : item.set.segments) {
      const std::int32_t tree = tree_of_[segment.rollout];
      plan_.trees[tree].physical_rows += segment.end - segment.begin;
      if (segment.multiplicity > 1) shared_[tree].any = true;
      if (trunk && segment.multiplicity > 1) shared_[tree].trunk = true;
      if (tree == before || !seen.insert(tree).second) continue;
      before = tree;
      (trunk ? plan_.trees[tree].trunks : plan_.trees[tree].waves) += 1;
    }
    for (const PlanItem& below : item.below) add(below, window_rows);
  }

  void name_schedules(const Forest& forest) {
    for (std::size_t i = 0; i < plan_.trees.size(); ++i) {
      TreePlan& tree = plan_.trees[i];
      if (plan_.requested != Schedule::automatic) {
        tree.schedule = plan_.requested;
        tree.reason = text_of("asked for by --schedule ", name_of(plan_.requested));
      } else {
        tree.schedule = shared_[i].trunk ? Schedule::phased : shared_[i].any ? Schedule::packed : Schedule::dense;
        tree.reason = reason(tree, forest[i].subtree(0).rows);
      }
    }
  }

 private:
  struct Shared {
    bool any = false, trunk = false;
  };

  std::string reason(const TreePlan& tree, std::int64_t distinct) const {
    const std::int64_t saved =
        100 * (tree.logical_rows - tree.physical_rows) / std::max<std::int64_t>(tree.logical_rows, 1);
    if (tree.schedule == Schedule::phased)
      return text_of(distinct, " distinct rows are more than a wave holds: the shared rows run once as ",
                     tree.trunks == 1 ? "a trunk" : text_of(tree.trunks, " trunks"), ", ", saved,
                     "% of the rows saved");
    if (tree.schedule == Schedule::packed)
      return tree.waves == 1 ? text_of("fits into one wave, ", saved, "% of the rows saved")
                             : text_of("a trunk would cost more than repeating the shared rows in ", tree.waves,
                                       " waves, ", saved, "% of the rows saved");
    if (tree.trunks > 0) return "nothing shared; longer than a wave, so it runs as a chain of trunks";
    return distinct == tree.logical_rows ? "nothing shared" : "sharing does not pay here";
  }

  StepPlan& plan_;
  std::vector<std::int32_t> tree_of_;
  std::vector<Shared> shared_;
};

// The best under what was asked for. All schedules are tried: the plan shows them beside each other.
Candidate best_of_schedules(const Search& search, Schedule asked, StepPlan& plan) {
  Candidate chosen;
  bool found = false;
  for (Schedule schedule : {Schedule::automatic, Schedule::packed, Schedule::phased, Schedule::dense}) {
    if (schedule == Schedule::automatic && asked != Schedule::automatic) continue;
    Candidate candidate = search.best(schedule);
    if (schedule == Schedule::packed) plan.packed = candidate.cost;
    if (schedule == Schedule::phased) plan.phased = candidate.cost;
    if (schedule == Schedule::dense) plan.dense = candidate.cost;
    if (asked != Schedule::automatic && schedule != asked) continue;
    if (!found || Search::better(candidate, chosen)) chosen = std::move(candidate), found = true;
  }
  return chosen;
}

// The options that hold a plan back, as a command would say them to leave the planner free.
std::string held_back(const PlanOptions& options) {
  std::string out;
  if (options.schedule != Schedule::automatic) out += " --schedule auto";
  if (options.token_budget > 0) out += " --token-budget 0";
  if (options.trunk_state != SavedState::automatic) out += " --trunk-state auto";
  if (options.wave_state != SavedState::automatic) out += " --wave-state auto";
  if (options.path_state != PathState::automatic) out += " --path-state auto";
  return out;
}

PlanOptions freed(PlanOptions options) {
  options.schedule = Schedule::automatic, options.token_budget = 0;
  options.trunk_state = SavedState::automatic, options.wave_state = SavedState::automatic;
  options.path_state = PathState::automatic;
  return options;
}

std::string amount(std::int64_t bytes) { return text_of(format_bytes(bytes), " (", bytes, " bytes)"); }

// The peak of the best plan; the planner's own choice of schedule where none is asked for.
std::int64_t peak_of(std::span<const Rollout> rollouts, const std::vector<PrefixTree>& trees, const LocalShape& shape,
                     const PlanOptions& options, const MachineProfile& profile) {
  StepPlan ignored;
  const Search search(rollouts, trees, shape, options, profile);
  return best_of_schedules(search, options.schedule, ignored).cost.bytes.peak();
}

// The bytes that no schedule can lower, as text if they alone are beyond the budget.
std::string text_of_constant(const ActivationBytes& bytes, const PlanOptions& options) {
  if (bytes.constant() < options.memory_budget) return "";
  const std::int64_t beside = options.setting.held.beside_bytes, own = bytes.constant() - bytes.model() - beside;
  return text_of("; weights, gradients and optimizer state are ", format_bytes(bytes.model()),
                 beside > 0 ? text_of(", other models ", format_bytes(beside)) : "", ", the process itself takes ",
                 format_bytes(own));
}

}  // namespace

std::int64_t least_budget(const std::function<std::int64_t(std::int64_t budget)>& peak_within) {
  constexpr int kTries = 8;
  std::int64_t budget = peak_within(1), before = budget;
  for (int tries = 0; tries < kTries; ++tries) {
    const std::int64_t peak = peak_within(budget);
    if (peak == budget) return budget;
    before = std::exchange(budget, peak);
  }
  return std::max(before, budget);
}

std::string remedy_for(std::int64_t needed, const PlanOptions& options,
                       const std::function<std::int64_t(const PlanOptions& changed)>& least) {
  std::string remedy = "Raise --memory-budget to " + amount(needed);
  const auto advise = [&](const std::string& words, const PlanOptions& changed) {
    const std::int64_t then = least(changed);
    if (then < needed)
      remedy += text_of(", or take", words, ", with which ",
                        then <= options.memory_budget ? "it fits" : amount(then) + " would do");
  };
  if (const std::string words = held_back(options); !words.empty()) advise(words, freed(options));
  // The bytes of other models in bfloat16 are not known here.
  if (options.dtype != DType::bfloat16 && options.setting.held.beside_bytes == 0) {
    PlanOptions changed = options;
    changed.dtype = DType::bfloat16;
    advise(" --dtype bfloat16", changed);
  }
  return remedy;
}

PlanOptions plan_options_of(const Options& options) {
  PlanOptions out;
  out.schedule = options.schedule;
  if (options.token_budget < 0)
    throw OptionError({"--token-budget", "a number of rows, or 0", text_of(options.token_budget), ""});
  out.token_budget = options.token_budget;
  out.memory_budget = given_budget(options).bytes;
  out.dtype = options.dtype;
  out.trunk_state = options.trunk_state;
  out.wave_state = options.wave_state;
  out.path_state = options.path_state;
  out.setting.device = traits_of(options.device);
  return out;
}

StepPlan make_plan(std::span<const Rollout> rollouts, const std::vector<PrefixTree>& trees, const LocalShape& shape,
                   const PlanOptions& options, const MachineProfile& profile) {
  if (path_of(options.path_state, shape.degrees().cp).latents && !may_carry_latents(shape.whole()))
    throw UnsupportedError(
        {text_of("--path-state ", name_of(options.path_state)), "a model with latent attention and without windows",
         narrows_path(shape.whole()) ? "layers with windows" : "other attention", "use --path-state auto"});
  const Search search(rollouts, trees, shape, options, profile);
  StepPlan plan;
  plan.requested = options.schedule;
  plan.memory_budget = options.memory_budget;
  plan.budget_given = options.token_budget > 0;
  plan.all_logprobs = options.all_logprobs;
  plan.by_temperature = !shape.whole().value_head;
  plan.window = shape.whole().window();
  plan.machine = profile.line();

  Candidate chosen = best_of_schedules(search, options.schedule, plan);
  if (!chosen.cost.fits) {
    plan.missing_bytes = chosen.cost.bytes.peak() - options.memory_budget;
    if (options.remedies || options.must_fit) {
      const auto least = [&](PlanOptions changed) {
        return least_budget([&](std::int64_t budget) {
          changed.memory_budget = budget;
          return peak_of(rollouts, trees, shape, changed, profile);
        });
      };
      const std::int64_t needed = least(options);
      plan.missing_bytes = needed - options.memory_budget;
      plan.remedy = remedy_for(needed, options, least) + text_of_constant(search.bytes(), options);
    }
    const std::int64_t needed = options.memory_budget + plan.missing_bytes;
    if (options.must_fit)
      throw StepTooLarge({"--memory-budget", text_of("at least ", format_bytes(needed), " for this step"),
                          text_of(format_bytes(options.memory_budget)), plan.remedy},
                         needed);
  }

  plan.chosen = chosen.cost;
  plan.tried = std::move(chosen.tried);
  plan.token_budget = chosen.options.budget;
  plan.path = chosen.path;
  const double ideal = search.ideal_flops();
  plan.ceiling = ideal > 0 ? search.dense_flops() / ideal : 1;
  plan.items.reserve(chosen.layout.items.size());
  for (const Draft& item : chosen.layout.items)
    plan.items.push_back(write_out(item, search.forest(), search.edges(), search.model(), chosen.path));
  Tally tally(search.forest(), rollouts.size(), plan);
  for (const PlanItem& item : plan.items) tally.add(item);
  tally.name_schedules(search.forest());
  return plan;
}

ScheduleCost cost_of_schedule(std::span<const Rollout> rollouts, const std::vector<PrefixTree>& trees,
                              const ModelShape& shape, const PlanOptions& options, const MachineProfile& profile) {
  try {
    const Candidate best = Search(rollouts, trees, shape, options, profile).best(options.schedule);
    return {best.cost, best.options.budget};
  } catch (const OptionError&) {
    PlanCost cost;
    cost.fits = false;
    return {cost, options.token_budget};
  }
}

}  // namespace espalier
