// `generate`: n responses to each prompt, as records of rollouts.
#include <cstdio>

#include "cli/verbs.h"
#include "espalier/base/error.h"
#include "espalier/base/units.h"
#include "espalier/generate/generate_records.h"

namespace espalier::cli {
namespace {

double rate(std::int64_t count, double seconds) { return seconds > 0 ? static_cast<double>(count) / seconds : 0; }

std::string rate_text(std::int64_t count, double seconds) {
  return format_count(static_cast<std::int64_t>(rate(count, seconds))) + " tokens/s";
}

std::string fixed(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", value);
  return text;
}

}  // namespace

int run_generate(Context& context) {
  const GeneratedRecords records = generate_records(context.options, context.progress, context.mesh);
  const GenerateReport& r = records.report;
  const double mean = rate(r.response_tokens, static_cast<double>(r.responses));
  context.result["prompts"] = r.prompts;
  context.result["rollouts"] = r.responses;
  context.result["tokens"] = {
      {"prompt", r.prompt_rows_logical}, {"prompt_physical", r.prompt_rows_physical}, {"response", r.response_tokens}};
  context.result["generation_seconds"] = {{"prompt", r.seconds_prompt}, {"decode", r.seconds_decode}};
  context.result["tokens_per_second"] = {{"prompt", rate(r.prompt_rows_physical, r.seconds_prompt)},
                                         {"decode", rate(r.response_tokens, r.seconds_decode)}};
  context.result["mean_length"] = mean;
  context.result["decode_steps"] = r.decode_steps;
  context.result["logprobs_over"] = r.kept_sets ? "kept_ids" : "vocabulary";
  if (r.kept_sets) context.result["mean_kept_ids"] = rate(r.kept_ids, static_cast<double>(r.response_tokens));
  context.result["kv_bytes"] = r.kv_bytes;
  context.result["kv_bytes_unshared"] = r.kv_bytes_unshared;
  if (records.reward) context.result["reward"] = *records.reward;
  const bool has_turns = r.turns > 0;
  if (has_turns) {
    context.result["turns"] = rate(r.turns, static_cast<double>(r.responses));
    context.result["tokens"]["observation"] = r.observation_tokens;
  }
  context.text << format_count(r.prompts) << " prompts, " << format_count(r.responses) << " responses, mean length "
               << fixed(mean) << "\n"
               << "prompts:   " << format_count(r.prompt_rows_physical)
               << " tokens computed (repeated: " << format_count(r.prompt_rows_logical) << ") in "
               << format_seconds(r.seconds_prompt) << ", " << rate_text(r.prompt_rows_physical, r.seconds_prompt)
               << "\n"
               << "responses: " << format_count(r.response_tokens) << " tokens in " << format_count(r.decode_steps)
               << " steps, " << format_seconds(r.seconds_decode) << ", "
               << rate_text(r.response_tokens, r.seconds_decode) << "\n"
               << "keys and values: " << format_bytes(r.kv_bytes)
               << " held (with a prompt for each response: " << format_bytes(r.kv_bytes_unshared) << ")\n";
  if (has_turns)
    context.text << "turns:     mean " << fixed(rate(r.turns, static_cast<double>(r.responses))) << ", "
                 << format_count(r.observation_tokens) << " tokens of observations\n";
  if (r.kept_sets)
    context.text << "kept sets: mean " << fixed(rate(r.kept_ids, static_cast<double>(r.response_tokens)))
                 << " tokens; rollout_logprobs are over kept_ids, full_logprobs over the whole vocabulary\n";
  if (records.reward) context.text << "rewards:   mean " << text_of(*records.reward) << "\n";
  context.text << "written: " << context.options.out << "\n";
  return 0;
}

}  // namespace espalier::cli
