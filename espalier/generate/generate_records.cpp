#include "espalier/generate/generate_records.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>

#include "espalier/base/error.h"
#include "espalier/base/units.h"
#include "espalier/config/model_config.h"
#include "espalier/config/rope_config.h"
#include "espalier/data/training_data.h"
#include "espalier/generate/end_tokens.h"
#include "espalier/generate/environment_turns.h"
#include "espalier/generate/prompts_file.h"
#include "espalier/parallel/agreement.h"
#include "espalier/rollout/writer.h"
#include "espalier/services/reward_function.h"
#include "espalier/services/rollout_text.h"
#include "espalier/state/held_models.h"
#include "espalier/state/model_state.h"
#include "espalier/state/planning.h"
#include "espalier/state/trained_choice.h"

namespace espalier {
namespace {

// Over trajectories, whose records repeat it.
double mean_reward(const Generated& generated) {
  double sum = 0;
  for (std::size_t i = 0; i < generated.rollouts.size(); ++i)
    if (i == 0 || generated.trajectory[i] != generated.trajectory[i - 1]) sum += *generated.rollouts[i].reward;
  return sum / static_cast<double>(generated.report.responses);
}

// The prompts as one text, which all ranks must have the same.
std::string text_of_prompts(std::span<const Prompt> prompts) {
  std::string text;
  for (const Prompt& prompt : prompts) {
    for (const std::int32_t id : prompt.ids) text += text_of(id, ' ');
    text += '\n';
  }
  return text;
}

}  // namespace

SamplingSettings sampling_settings(const Options& options) {
  const std::vector<double> n = parse_numbers("--n", options.n);
  if (n.size() != 1 || n.front() != std::floor(n.front()) || n.front() < 1)
    throw OptionError({"--n", "one whole number, at least 1", '"' + options.n + '"', ""});
  SamplingSettings settings;
  settings.n = static_cast<std::int64_t>(n.front());
  settings.temperature = options.temperature;
  settings.top_p = options.top_p;
  settings.top_k = options.top_k;
  settings.kept_sets = options.kept_sets == KeptSetsUse::automatic;
  settings.max_response_length = options.max_response_length;
  settings.max_num_seqs = options.max_num_seqs;
  settings.token_budget = options.token_budget;
  settings.most_turns = options.turns;
  settings.renders = options.observations == ObservationForm::render;
  settings.seed = static_cast<std::uint64_t>(options.seed);
  return settings;
}

void check_environment(const Options& options) {
  if (options.env.empty() && options.turns > 1)
    throw OptionError({"--turns", "--env, a Python file with a class Environment", "none",
                       "give --env FILE.py (docs/agents.md), or leave --turns out"});
  if (options.env.empty() && options.observations == ObservationForm::render)
    throw OptionError({"--observations", "--env, a Python file with a class Environment", "none",
                       "give --env FILE.py (docs/agents.md), or leave --observations out"});
  if (options.env.empty()) return;
  if (!options.reward.empty())
    throw OptionError({"--reward", "no reward function with --env, whose step gives the rewards", options.reward,
                       "leave one of the two out"});
}

std::vector<std::int32_t> stop_ids(const Options& options, std::int64_t vocabulary, const Tokenizer* tokenizer) {
  std::vector<std::int32_t> ids;
  if (options.stop_ids.empty()) {
    ids = model_end_tokens(options.model);
    const std::optional<std::int32_t> eos = tokenizer ? tokenizer->eos() : std::nullopt;
    if (eos && std::ranges::find(ids, *eos) == ids.end()) ids.push_back(*eos);
    return ids;
  }
  for (const double id : parse_numbers("--stop-ids", options.stop_ids)) {
    if (id != std::floor(id) || id < 0 || id >= static_cast<double>(vocabulary))
      throw OptionError({"--stop-ids", text_of("token ids in [0, ", vocabulary, ")"), text_of(id), ""});
    ids.push_back(static_cast<std::int32_t>(id));
  }
  return ids;
}

void plan_memory(const LocalShape& shape, const Options& options, SamplingSettings& settings, const Mesh& mesh) {
  constexpr std::int64_t kFewestRows = 16;
  const std::int64_t own =
      budget_of(options, mesh.local_ranks).bytes - bytes_held(std::array{HeldModel{shape}}, options.dtype);
  const auto limit = static_cast<std::int64_t>(-maxima_over_ranks(mesh.world, {-static_cast<double>(own)}).front());
  const auto activations = [&](std::int64_t rows) { return sampling_bytes(shape, options.dtype, rows); };
  if (settings.token_budget == 0) {
    settings.token_budget = kMostPromptRows;
    while (settings.token_budget > kFewestRows && activations(settings.token_budget) > limit / 4)
      settings.token_budget /= 2;
  }
  std::int64_t decoded = settings.max_num_seqs > 0 ? settings.max_num_seqs : kMostDecoded;
  if (settings.max_num_seqs == 0)
    while (decoded > 1 && activations(decoded) > limit / 4) decoded /= 2;
  const std::int64_t most = std::max(activations(settings.token_budget), activations(decoded));
  if (settings.max_num_seqs == 0) settings.max_num_seqs = decoded;
  if (settings.kv_limit_bytes == 0) settings.kv_limit_bytes = std::max<std::int64_t>(1, limit - most);
}

GeneratedRecords generate_records(const Options& options, Progress& progress, const Mesh& mesh) {
  if (options.out.empty()) throw OptionError({"--out", "a file to write", "nothing", "give --out rollouts.jsonl"});
  SamplingSettings settings = sampling_settings(options);
  check_environment(options);
  const ModelShape shape = read_trained_shape(options.model, scored_choice(options));
  require_room(std::array{HeldModel{local_shape(shape, mesh)}}, options);
  std::optional<RewardFunction> reward;
  if (mesh.writes() && !options.reward.empty()) reward.emplace(options.reward, options.reward_timeout);
  std::optional<Environment> environment;
  if (!options.env.empty()) environment.emplace(options.env, options.reward_timeout);
  LazyTokenizer tokenizers(options.model, options.chat_template_kwargs);
  const PromptFile file = read_prompts(options.prompts, shape.vocabulary, tokenizers, progress, options.columns);
  for (const std::string& note : file.notes) progress.note(note);
  for (const Prompt& prompt : file.prompts) refuse_image_tokens(prompt.ids, prompt.where + ": prompt", shape);
  Tokenizer* const tokenizer = environment || !options.reward.empty() || !options.stop.empty() || file.has_text
                                   ? &tokenizers.get()
                                   : tokenizers.at_hand(progress);
  require_same(mesh.world, options.prompts, text_of_prompts(file.prompts), "give every rank the same files");
  const auto model = load_model(options.model, options.dtype, progress, mesh, scored_choice(options));
  settings.stop_ids = stop_ids(options, shape.vocabulary, tokenizer);
  std::optional<StopStrings> stops;
  if (!options.stop.empty()) settings.stops = &stops.emplace(split_paths(options.stop), *tokenizer);
  if (settings.stop_ids.empty() && !stops)
    progress.note("no stop tokens: the model has no eos_token_id, so every response has the full length");
  std::optional<RolloutWriter> writer;  // before the work, so that an unwritable place costs nothing
  if (mesh.writes()) writer.emplace(options.out);
  plan_memory(model->decoder.local(), options, settings, mesh);
  const std::int64_t positions = positions_needed(model->shape, file.prompts, settings);
  model->decoder.reserve_positions(positions);
  for (const std::string& note : position_notes(
           model->shape, positions, text_of("prompts and --max-response-length reach ", positions, " tokens")))
    progress.note(note);

  Arena arena(budget_of(options).beside_held());
  GeneratedRecords out;
  std::optional<TokenizerTexts> texts;
  if (environment) texts.emplace(*tokenizer);
  Generated generated =
      environment ? generate_trajectories(model->decoder, file.prompts, settings, *environment, *texts, arena, progress)
                  : generate(model->decoder, file.prompts, settings, arena, progress);
  std::vector<Rollout>& rollouts = generated.rollouts;
  out.report = generated.report;
  if (!writer) return out;
  if (tokenizer) add_texts(rollouts, *tokenizer, settings.stops);
  std::optional<ErrorText> unrewarded;  // what was sampled is written whatever the user's Python does
  if (reward) {
    try {
      const std::vector<Score> scores = reward->of(rollouts, progress);
      add_scores(rollouts, scores);
      out.reward = mean_score(scores);
      const auto unjudged = std::ranges::count_if(scores, [](const Score& score) { return !score.score; });
      if (const std::string note = unjudged_note(unjudged, std::ssize(scores)); !note.empty()) progress.note(note);
    } catch (const InputError& error) {
      unrewarded = error.text();
    }
  }
  if (environment && !generated.failure) out.reward = mean_reward(generated);
  for (const Rollout& rollout : rollouts) writer->write(rollout);
  writer->finish();
  if (unrewarded) {
    unrewarded->remedy +=
        text_of(unrewarded->remedy.empty() ? "" : "; ", "the responses are kept in ", options.out, ", without rewards");
    throw InputError(*unrewarded);
  }
  if (generated.failure) {
    ErrorText failure = *generated.failure;
    failure.remedy += text_of(failure.remedy.empty() ? "" : "; ", "the samples are kept in ", options.out,
                              ", unfinished trajectories with finish_reason \"abort\" and without a reward");
    throw InputError(failure);
  }
  return out;
}

}  // namespace espalier
