#include "cli/dry_run.h"

#include <array>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/base/units.h"
#include "espalier/config/model_config.h"
#include "espalier/data/training_data.h"
#include "espalier/generate/generate_records.h"
#include "espalier/generate/prompts_file.h"
#include "espalier/loop/run_start.h"
#include "espalier/objective/objective.h"
#include "espalier/score/score.h"
#include "espalier/services/environment.h"
#include "espalier/services/reward_function.h"
#include "espalier/shape/trained_parameters.h"
#include "espalier/state/held_models.h"
#include "espalier/state/trained_choice.h"
#include "espalier/tasks/word_tasks.h"

namespace espalier::cli {
namespace {

// The fields that the objective needs, in every rollout. A critic's advantages would need its values first.
void check_objective(const TrainingData& data, const Options& options) {
  if (!options.critic.empty() || options.objective == ObjectiveKind::reward) return;
  for (std::int64_t i = 0; i < data.mini_batches(); ++i) {
    const MiniBatch mini_batch = data.mini_batch(i);
    Objective(mini_batch.rollouts, mini_batch.advantages, options);
  }
}

// `verify` and `train`: the rollouts as an update takes them.
void check_update(const ModelShape& shape, Context& context, std::int64_t epochs) {
  const Options& options = context.options;
  const TrainingData data(
      read_for_model(options.rollouts, shape, context.progress, record_use_of(options, text_rows_of(options))), options,
      !options.critic.empty());
  check_objective(data, options);
  for (const std::string& note : data.notes()) context.progress.note("note: " + note);
  const std::int64_t all = epochs * data.mini_batches(), steps = options.steps > 0 ? options.steps : all;
  context.result["rollouts"] = data.rollouts().size();
  context.result["steps"] = std::min(all, steps);
  context.text << format_count(static_cast<std::int64_t>(data.rollouts().size())) << " rollouts, "
               << format_count(std::min(all, steps)) << (std::min(all, steps) == 1 ? " step\n" : " steps\n");
}

void dry_verify(Context& context) {
  const Options& options = context.options;
  const ModelShape shape = read_trained_shape(options.model, trained_choice(options));
  std::vector<HeldModel> held{{shape, {}}};
  if (const auto critic = trained_critic(options)) held.push_back({read_critic_shape(*critic), {}});
  require_room(held, options);
  check_update(shape, context, 1);
}

// The exit code of its plan, which is shown even where it does not fit.
int dry_train(Context& context) {
  Options options = context.options;
  if (options.model.empty()) options.model = model_source(options);
  options.critic = critic_directory(options);
  options.out.clear();  // a plan's is a picture
  check_update(read_trained_shape(options.model, trained_choice(options)), context, options.epochs);
  NoProgress silent;  // notes on the rollouts were given
  Context planned{options, context.arguments, silent, context.text, context.mesh};
  const int code = run_plan(planned);
  context.result["plan"] = std::move(planned.result);
  return code;
}

void dry_score(Context& context) {
  const Options& options = context.options;
  const ModelShape shape = read_trained_shape(options.model, scored_choice(options, true));
  std::vector<HeldModel> held{{shape}};
  if (const auto critic = scored_critic(options)) held.push_back({read_critic_shape(*critic)});
  require_room(held, options);
  const std::size_t rollouts =
      read_for_model(options.rollouts, shape, context.progress, record_use_of(options, scored_rows(options))).size();
  context.result["rollouts"] = rollouts;
  context.text << format_count(static_cast<std::int64_t>(rollouts)) << " rollouts to score\n";
}

void dry_generate(Context& context) {
  const Options& options = context.options;
  const ModelShape shape = read_trained_shape(options.model, scored_choice(options));
  const SamplingSettings settings = sampling_settings(options);
  require_room(std::array{HeldModel{shape}}, options);
  check_environment(options);
  if (!options.env.empty()) Environment(options.env, options.reward_timeout);
  LazyTokenizer tokenizer(options.model, options.chat_template_kwargs);
  stop_ids(options, shape.vocabulary, nullptr);
  if (!options.reward.empty()) RewardFunction(options.reward, options.reward_timeout);
  const PromptFile file = read_prompts(options.prompts, shape.vocabulary, tokenizer, context.progress, options.columns);
  const auto prompts = static_cast<std::int64_t>(file.prompts.size());
  context.result["prompts"] = prompts;
  context.text << format_count(prompts) << " prompts, " << format_count(settings.n) << " responses each\n";
}

void dry_grpo(Context& context) {
  const Options& options = context.options;
  require_new_run(options);
  if (options.resume.empty()) check_new_run(options, word_tasks(), context.progress);
  context.text << (options.resume.empty() ? "a new run in " + options.out : "more of the run in " + options.resume)
               << "\n";
}

}  // namespace

int dry_run(const Verb& verb, Context& context) {
  switch (verb.letter) {
    case 't':
      if (const int code = dry_train(context)) return code;
      break;
    case 'v':
      dry_verify(context);
      break;
    case 's':
      dry_score(context);
      break;
    case 'g':
      dry_generate(context);
      break;
    case 'l':
      dry_grpo(context);
      break;
    default:
      throw OptionError({"--dry-run", "train, score, verify, generate or grpo", verb.name, "leave it out"});
  }
  context.result["dry_run"] = true;
  context.text << "dry run: options and input are fine; no weights were read, nothing was run or written\n";
  return 0;
}

}  // namespace espalier::cli
