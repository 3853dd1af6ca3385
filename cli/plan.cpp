// espalier plan: what would run for each optimizer step, from config.json and the rollouts' tokens alone.
#include <algorithm>
#include <iomanip>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <sstream>
#include <vector>

#include "cli/plan.h"
#include "cli/reading.h"
#include "espalier/base/error.h"
#include "espalier/base/quantised_rows.h"
#include "espalier/base/units.h"
#include "espalier/config/model_config.h"
#include "espalier/data/training_data.h"
#include "espalier/forecast/planned_machine.h"
#include "espalier/grouping/shared_tokens.h"
#include "espalier/measure/machine.h"
#include "espalier/objective/score_loss.h"
#include "espalier/plan/layout_search.h"
#include "espalier/plan/planner.h"
#include "espalier/plan/rank_layout.h"
#include "espalier/plan/recorded_experts_fit.h"
#include "espalier/rollout/kept_sets.h"
#include "espalier/rollout/mini_batches.h"
#include "espalier/saved/spill_file.h"
#include "espalier/shape/trained_parameters.h"
#include "espalier/state/held_models.h"
#include "espalier/state/planning.h"
#include "espalier/state/trained_choice.h"

namespace espalier::cli {
namespace {

constexpr std::size_t kShownSteps = 20;
constexpr int kDoesNotFit = 5;  // the exit code of a plan that does not fit, and is shown all the same

// The steps of a file as one cost: work and time add up, peaks do not.
PlanCost sum_of(const std::vector<StepPlan>& plans, PlanCost StepPlan::*member) {
  PlanCost sum;
  for (const StepPlan& plan : plans) {
    const PlanCost& cost = plan.*member;
    sum.flops += cost.flops;
    sum.seconds += cost.seconds;
    sum.bytes.a = std::max(sum.bytes.a, cost.bytes.a);
    sum.bytes.b = std::max(sum.bytes.b, cost.bytes.b);
    sum.bytes.c = std::max(sum.bytes.c, cost.bytes.c);
    sum.fits = sum.fits && cost.fits;
  }
  return sum;
}

std::int64_t total(const std::vector<StepPlan>& plans, std::int64_t StepPlan::*member) {
  std::int64_t sum = 0;
  for (const StepPlan& plan : plans) sum += plan.*member;
  return sum;
}

struct Column {
  const char* name;
  PlanCost StepPlan::*cost;
};
constexpr Column kSchedules[] = {{"dense", &StepPlan::dense},
                                 {"packed", &StepPlan::packed},
                                 {"phased", &StepPlan::phased},
                                 {"chosen", &StepPlan::chosen}};

// FLOPs dense over FLOPs with every shared row once, of all steps together.
double ceiling_of(const std::vector<StepPlan>& plans) {
  double dense = 0, ideal = 0;
  for (const StepPlan& plan : plans) {
    dense += plan.dense.flops;
    ideal += plan.dense.flops / plan.ceiling;
  }
  return ideal > 0 ? dense / ideal : 1;
}

// The fields of one plan, over all steps; each tree says which step it belongs to.
Json json_of(const std::vector<StepPlan>& plans) {
  Json out;
  out["trees"] = Json::array();
  Json steps = Json::array();
  double used_budgets = 0;
  for (std::size_t step = 0; step < plans.size(); ++step) {
    Json one = to_json(plans[step]);
    for (Json& tree : one["trees"]) {
      tree["step"] = step + 1;
      out["trees"].push_back(std::move(tree));
    }
    one.erase("trees");
    used_budgets += one["fill"].get<double>() * static_cast<double>(plans[step].waves);
    steps.push_back({{"step", step + 1}});
    steps.back().update(one);
  }
  out["steps"] = std::move(steps);
  out["trunks"] = total(plans, &StepPlan::trunks);
  const std::int64_t waves = total(plans, &StepPlan::waves);
  out["waves"] = waves;
  out["fill"] = waves > 0 ? used_budgets / static_cast<double>(waves) : 0;  // mean over waves of rows / budget
  const std::int64_t trunk_rows = total(plans, &StepPlan::trunk_rows), wave_rows = total(plans, &StepPlan::wave_rows);
  out["rows"] = {{"logical", total(plans, &StepPlan::logical_rows)},
                 {"physical", trunk_rows + wave_rows},
                 {"trunk", trunk_rows},
                 {"wave", wave_rows}};
  for (const Column& column : kSchedules) {
    const PlanCost cost = sum_of(plans, column.cost);
    out["flops"][column.name] = cost.flops;
    out["predicted"][column.name] = {{"seconds", cost.seconds},
                                     {"peak_bytes", {{"A", cost.bytes.a}, {"B", cost.bytes.b}, {"C", cost.bytes.c}}},
                                     {"fits", cost.fits}};
  }
  out["ceiling"] = ceiling_of(plans);
  out["machine"] = plans.empty() ? "" : plans.front().machine;
  return out;
}

// "phased 6, dense 2": what was chosen for how many trees.
std::string schedules_of(const StepPlan& plan) {
  std::map<std::string, std::int64_t> counts;
  for (const TreePlan& tree : plan.trees) ++counts[name_of(tree.schedule)];
  std::string out;
  for (const auto& [name, count] : counts) {
    out += (out.empty() ? "" : ", ") + name;
    if (counts.size() > 1) out += ' ' + format_count(count);
  }
  return out;
}

std::string times(double ratio) {
  std::ostringstream out;
  out << std::fixed << std::setprecision(2) << ratio << "x";
  return out.str();
}

void print_steps(std::ostream& out, const std::vector<StepPlan>& plans) {
  const auto cell = [&](const std::string& text, int width) { out << std::setw(width) << text; };
  out << "  step   trees   rows dense       to run    trunks     waves     predicted        peak  runs as\n";
  for (std::size_t step = 0; step < std::min(plans.size(), kShownSteps); ++step) {
    const StepPlan& plan = plans[step];
    cell(format_count(static_cast<std::int64_t>(step) + 1), 6);
    cell(format_count(static_cast<std::int64_t>(plan.trees.size())), 8);
    cell(format_count(plan.logical_rows), 13);
    cell(format_count(plan.physical_rows()), 13);
    cell(format_count(plan.trunks), 10);
    cell(format_count(plan.waves), 10);
    cell(format_seconds(plan.chosen.seconds), 14);
    cell(format_bytes(plan.chosen.bytes.peak()), 12);
    out << "  " << schedules_of(plan) << '\n';
  }
  if (plans.size() > kShownSteps) out << "   ... and " << plans.size() - kShownSteps << " more\n";
}

void print_costs(std::ostream& out, const std::vector<StepPlan>& plans) {
  const PlanCost dense = sum_of(plans, &StepPlan::dense);
  out << "\n               predicted   speed-up        peak\n";
  for (const Column& column : kSchedules) {
    const PlanCost cost = sum_of(plans, column.cost);
    out << "  " << std::left << std::setw(8) << column.name << std::right << std::setw(14)
        << format_seconds(cost.seconds) << std::setw(11) << times(dense.seconds / std::max(cost.seconds, 1e-12))
        << std::setw(12) << format_bytes(cost.bytes.peak()) << (cost.fits ? "" : "  does not fit the budget") << '\n';
  }
  out << "\nAt most about " << times(ceiling_of(plans))
      << " is possible here: FLOPs dense over those with every shared token computed once.\nMachine: "
      << (plans.empty() ? "" : plans.front().machine.substr(0, plans.front().machine.find(':'))) << '\n';
}

// --explain: each step in full, as long as a person may want to read that.
void print_explanations(std::ostream& out, const std::vector<StepPlan>& plans) {
  constexpr std::size_t kExplained = 3;
  for (std::size_t step = 0; step < std::min(plans.size(), kExplained); ++step) {
    if (plans.size() > 1) out << "\nStep " << step + 1 << "\n";
    out << '\n' << explain(plans[step]);
  }
  if (plans.size() > kExplained) out << "\n(the first " << kExplained << " of " << plans.size() << " steps)\n";
}

struct Shortage {
  std::int64_t missing_bytes = 0;  // 0: everything fits
  std::string remedy;
};

// The shortage of the step that lacks most.
Shortage shortage_of(const std::vector<StepPlan>& plans) {
  const auto worst = std::ranges::max_element(plans, {}, &StepPlan::missing_bytes);
  return worst == plans.end() ? Shortage{} : Shortage{worst->missing_bytes, worst->remedy};
}

using MiniBatches = std::vector<std::vector<Rollout>>;

// The one with most tokens, which decides a layout.
const std::vector<Rollout>& longest_of(const MiniBatches& mini_batches) {
  const auto tokens = [](const std::vector<Rollout>& rollouts) {
    std::int64_t sum = 0;
    for (const Rollout& rollout : rollouts) sum += rollout.length();
    return sum;
  };
  return *std::ranges::max_element(mini_batches, {}, tokens);
}

// How the steps of one model, actor or critic, are planned: on one process, or on the ranks of a layout.
class Planning {
 public:
  // `model` is one of `held`.
  Planning(const Context& context, const MiniBatches& mini_batches, const HeldModel& model,
           std::span<const HeldModel> held, const PlanOptions& plan_options, const MachineProfile& profile)
      : options_(context.options),
        mini_batches_(mini_batches),
        shape_(model.shape.whole()),
        held_beside_(bytes_beside(model, held, context.options.dtype)),
        plan_options_(plan_options),
        profile_(profile) {
    for (const HeldModel& other : held)
      if (&other != &model) beside_.push_back(other.shape.whole());
  }

  // The layout of the given degrees, or with --layout auto of degrees for the longest mini-batch; none for one process.
  std::optional<FoundLayout> layout() const {
    const Degrees degrees = degrees_of(options_);
    const bool automatic = options_.layout == LayoutChoice::automatic;
    const std::int64_t ranks = automatic && options_.ranks > 0 ? options_.ranks : degrees.ranks();
    if (mini_batches_.empty() || (ranks == 1 && degrees.ep == 1)) return std::nullopt;
    const std::vector<Rollout>& rollouts = longest_of(mini_batches_);
    const std::vector<PrefixTree> trees = build_prefix_trees(rollouts, options_.share);
    const LayoutProblem problem = problem_of(rollouts, trees);
    if (automatic) return find_layout(problem, ranks);
    return FoundLayout{plan_layout(problem, degrees), {}, ""};
  }

  // One plan a mini-batch.
  std::vector<StepPlan> steps(const std::optional<Degrees>& degrees, Progress& progress) const {
    std::vector<StepPlan> plans;
    progress.begin(shape_.value_head ? "planning the critic" : "planning",
                   static_cast<std::int64_t>(mini_batches_.size()), "steps");
    for (const std::vector<Rollout>& rollouts : mini_batches_) {
      const std::vector<PrefixTree> trees = build_prefix_trees(rollouts, options_.share);
      const LayoutProblem problem = problem_of(rollouts, trees);
      if (degrees) {
        plans.push_back(step_on_ranks(problem, plan_layout(problem, *degrees)));
      } else {
        PlanOptions alone = problem.options;
        alone.setting.held.beside_bytes = held_beside_;
        plans.push_back(make_plan(rollouts, trees, shape_, alone, profile_));
      }
      progress.advance_to(static_cast<std::int64_t>(plans.size()));
    }
    progress.end();
    return plans;
  }

 private:
  LayoutProblem problem_of(std::span<const Rollout> rollouts, const std::vector<PrefixTree>& trees) const {
    LayoutProblem problem{rollouts, trees, shape_, plan_options_, profile_, options_.shard, beside_};
    problem.options.kind = step_kind_of(options_, shape_, rollouts);
    return problem;
  }

  const Options& options_;
  const MiniBatches& mini_batches_;
  const ModelShape& shape_;
  std::int64_t held_beside_;
  PlanOptions plan_options_;
  const MachineProfile& profile_;
  std::vector<ModelShape> beside_;
};

void report_layout(Context& context, const FoundLayout& found) {
  constexpr std::size_t kShown = 8;
  Json& out = context.result["layout"] = to_json(found.best);
  context.text << explain(found.best);
  if (!found.reason.empty()) {
    out["reason"] = found.reason;
    for (const TriedLayout& tried : found.tried) out["tried"].push_back(to_json(tried));
    context.text << "  chosen because " << found.reason << ":\n";
    for (std::size_t i = 0; i < std::min(kShown, found.tried.size()); ++i) {
      const TriedLayout& tried = found.tried[i];
      context.text << "    " << std::left << std::setw(28) << text_of_degrees(tried.degrees) << std::right
                   << std::setw(12) << (tried.seconds > 0 ? format_seconds(tried.seconds) : "") << std::setw(12)
                   << format_bytes(tried.peak_bytes) << (tried.fits ? "" : "  does not fit") << '\n';
    }
  }
  context.text << "\nIts steps; rows of all processes, peak bytes of any process:\n\n";
}

void print_plans(Context& context, const std::vector<StepPlan>& plans) {
  print_steps(context.text, plans);
  print_costs(context.text, plans);
  if (context.options.explain) print_explanations(context.text, plans);
}

// Refuses options that would be ignored.
void check_layout_options(const Options& options) {
  const bool automatic = options.layout == LayoutChoice::automatic, alone = degrees_of(options).ranks() == 1;
  const char* const degrees = "give the degrees: --tp, --cp, --pp, --dp, --ep";
  if (options.ranks > 0 && !automatic)
    throw OptionError({"--ranks", "--layout auto, which arranges that many processes", text_of(options.ranks),
                       text_of("use --layout auto, or ", degrees)});
  if (automatic && options.ranks == 0 && alone)
    throw OptionError(
        {"--layout", "--ranks with auto, the number of processes to arrange", "auto alone", "give --ranks N"});
  if (!options.frontier) return;
  if (automatic)
    throw OptionError(
        {"--layout", "degrees with --frontier, because its prompts grow under one layout", "auto", degrees});
  if (options.shard != Sharding::none && alone)
    throw OptionError({"--shard", "several processes over which to shard the model",
                       text_of(name_of(options.shard), " on one"), "give --dp or --cp, or leave it out"});
}

}  // namespace

MachineProfile machine_of(Context& context, PlanOptions& options) {
  const std::string& named = context.options.machine;
  const bool any_gpu = named.empty() && context.options.device == DeviceType::cuda;
  if (any_gpu) context.progress.note("note: planning for an h100; --machine names another");
  const MachineProfile profile = any_gpu         ? planned_machine("h100", options.dtype, context.options.attention)
                                 : named.empty() ? machine_profile(context.options, context.progress)
                                                 : planned_machine(named, options.dtype, context.options.attention);
  options.setting.device.cuda = profile.device == "cuda";
  options.setting.device.attention = profile.attention_kernels;
  options.setting.device.deterministic = context.options.deterministic == OnOff::on;
  const bool here = named.empty() && !any_gpu;  // of another machine nobody knows what it has room for
  if (options.memory_budget == 0)
    options.memory_budget = here ? budget_of(context.options).bytes : profile.memory_bytes;
  options.spill_room = here ? room_to_spill(context.options.spill_dir) : std::numeric_limits<std::int64_t>::max();
  context.result["device"] = profile.device;
  return profile;
}

// Frozen matrices in fewer bits than the model's dtype, of all models and ranks.
void report_held(Context& context, const std::vector<HeldModel>& held) {
  std::int64_t narrow = 0;
  std::map<quantised::Kind, std::int64_t> quantised;
  for (const HeldModel& model : held) {
    const LocalShape whole(model.shape.whole());
    narrow += whole.parameters(Parameters::narrow) * bytes_of(DType::bfloat16);
    if (const std::int64_t bytes = whole.parameters(Parameters::quantised); bytes > 0)
      quantised[whole.whole().trained.quantised_form.kind] += bytes;
  }
  for (const auto& [kind, bytes] : quantised) {
    const quantised::Rows& rows = quantised::rows_of(kind);
    context.result[text_of(rows.word, "_bytes")] = bytes;
    context.text << "\nFrozen matrices in " << rows.name << ": " << format_bytes(bytes) << ".\n";
  }
  if (narrow > 0) {
    context.result["mapped_bytes_at_most"] = narrow;
    context.text << "\nFrozen matrices in bfloat16: " << format_bytes(narrow)
                 << ". They are pages of the model's files where these hold them as they are read; processes of one\n"
                    "machine share such pages, and peak bytes count them in every process (docs/lora.md).\n";
  }
}

int run_plan(Context& context) {
  const Options& options = context.options;
  check_layout_options(options);
  if (options.frontier) return run_frontier(context);
  if (!options.out.empty())
    throw OptionError({"--out", "--frontier, which writes a picture there", '"' + options.out + '"', "leave it out"});
  const ModelShape shape = read_trained_shape(options.model, trained_choice(options));
  PlanOptions plan_options = plan_options_of(options);
  plan_options.must_fit = false;
  std::vector<HeldModel> held{{shape, {}}};
  if (const auto critic = trained_critic(options)) held.push_back({read_critic_shape(*critic), {}});
  RolloutFile file = read_for(context, split_paths(options.rollouts), shape.vocabulary, "", text_rows_of(options));
  for (const std::string& note : position_notes(file.rollouts, shape)) context.progress.note("note: " + note);
  fit_recorded_experts(file.rollouts, shape);
  if (const std::string note = settle_kept_sets(file.rollouts, options.kept_sets); !note.empty())
    context.progress.note("note: " + note);
  if (options.objective == ObjectiveKind::reward) end_with_scores(file.rollouts);
  for (const std::string& note : settle_shared_tokens(file.rollouts, options.shared_tokens))
    context.progress.note("note: " + note);
  const MachineProfile profile = machine_of(context, plan_options);
  const std::int64_t budget = plan_options.memory_budget;
  const auto cut = cut_mini_batches(file.rollouts, options.mini_batch_size);
  if (const std::string note = mini_batch_note(file.rollouts, cut, options.mini_batch_size); !note.empty())
    context.progress.note("note: " + note);
  MiniBatches mini_batches;
  for (const std::vector<std::int64_t>& indices : cut) {
    mini_batches.emplace_back();
    for (const std::int64_t index : indices)
      mini_batches.back().push_back(std::move(file.rollouts[static_cast<std::size_t>(index)]));
  }
  const Planning planning(context, mini_batches, held.front(), held, plan_options, profile);
  const std::optional<FoundLayout> layout = planning.layout();
  const auto degrees = layout ? std::optional(layout->best.degrees) : std::nullopt;
  const std::vector<StepPlan> plans = planning.steps(degrees, context.progress);
  context.result.update(json_of(plans));
  context.result["memory_budget"] = budget;
  if (layout) report_layout(context, *layout);
  print_plans(context, plans);
  Shortage shortage = shortage_of(plans);
  if (held.size() > 1) {
    const std::vector<StepPlan> of_critic =
        Planning(context, mini_batches, held.back(), held, plan_options, profile).steps(degrees, context.progress);
    context.result["critic"] = json_of(of_critic);
    context.text << "\nThe critic's steps, each before the actor's:\n\n";
    print_plans(context, of_critic);
    if (const Shortage its = shortage_of(of_critic); its.missing_bytes > shortage.missing_bytes) shortage = its;
  }
  report_held(context, held);
  if (const Budget of_this_machine = budget_of(options); budget == of_this_machine.bytes && !of_this_machine.given) {
    context.result["memory_margin"] = of_this_machine.margin;
    context.text << "\nMemory budget: " << of_this_machine.text() << ". --memory-budget gives another.\n";
  }
  context.result["fits"] = shortage.missing_bytes == 0;
  context.result["missing_bytes"] = shortage.missing_bytes;
  if (shortage.missing_bytes == 0) return 0;
  context.text << "\nDoes not fit " << format_bytes(budget) << ": " << format_bytes(shortage.missing_bytes)
               << " are missing. " << shortage.remedy << ".\n";
  return kDoesNotFit;
}

}  // namespace espalier::cli
