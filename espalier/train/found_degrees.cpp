#include "espalier/train/found_degrees.h"

#include <algorithm>
#include <utility>

#include "espalier/config/model_config.h"
#include "espalier/data/training_data.h"
#include "espalier/device/device.h"
#include "espalier/grouping/shared_tokens.h"
#include "espalier/measure/machine.h"
#include "espalier/objective/score_loss.h"
#include "espalier/plan/layout_search.h"
#include "espalier/rollout/mini_batches.h"
#include "espalier/score/score.h"
#include "espalier/shape/trained_parameters.h"
#include "espalier/state/held_models.h"
#include "espalier/state/planning.h"
#include "espalier/state/trained_choice.h"

namespace espalier {
namespace {

// The mini-batch with most tokens; score takes all in one.
std::vector<Rollout> longest_mini_batch(std::vector<Rollout> rollouts, std::int64_t size) {
  std::vector<Rollout> longest;
  std::int64_t most = -1;
  for (const std::vector<std::int64_t>& indices : cut_mini_batches(rollouts, size)) {
    std::int64_t tokens = 0;
    for (const std::int64_t index : indices) tokens += rollouts[static_cast<std::size_t>(index)].length();
    if (tokens <= most) continue;
    most = tokens;
    longest.clear();
    for (const std::int64_t index : indices) longest.push_back(rollouts[static_cast<std::size_t>(index)]);
  }
  return longest;
}

}  // namespace

FoundDegrees find_degrees(const Options& options, char verb, std::int64_t processes, std::int64_t local,
                          Progress& progress) {
  NoProgress silent;  // the run itself reads them again, and says what there is to be said
  const bool trains = verb != 's';
  const ModelShape shape =
      read_trained_shape(model_source(options), trains ? trained_choice(options) : scored_choice(options, true));
  std::vector<Rollout> read = read_for_model(
      options.rollouts, shape, silent, record_use_of(options, trains ? text_rows_of(options) : scored_rows(options)));
  if (shape.value_head) end_with_scores(read);
  if (trains) settle_shared_tokens(read, options.shared_tokens);
  const std::vector<Rollout> rollouts = longest_mini_batch(std::move(read), trains ? options.mini_batch_size : 0);
  PlanOptions plan_options = plan_options_of(options);
  plan_options.must_fit = false;
  plan_options.kind = trains ? step_kind_of(options, shape, rollouts) : forward_kind_of(shape, rollouts);
  plan_options.setting.held = trains ? HeldState() : kWeightsOnly;
  plan_options.all_logprobs = !trains;
  if (const auto critic = trains ? trained_critic(options) : scored_critic(options))
    plan_options.setting.held.beside_bytes =
        HeldModel{read_critic_shape(*critic), plan_options.setting.held}.bytes(options.dtype);
  plan_options.memory_budget = budget_of(options, static_cast<int>(local)).bytes;
  MachineProfile profile = machine_profile(options, progress);
  profile.ranks_per_machine = local;
  plan_options.setting.device = bound_traits(options, profile);
  const std::vector<PrefixTree> trees = build_prefix_trees(rollouts, options.share);
  const SearchedAxes axes{.ep = options.shard != Sharding::optimizer};
  const FoundLayout found =
      find_layout({rollouts, trees, shape, plan_options, profile, options.shard}, processes, axes);
  return {found.best.degrees, found.reason};
}

}  // namespace espalier
