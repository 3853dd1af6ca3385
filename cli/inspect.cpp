// espalier inspect ROLLOUTS...
#include <algorithm>

#include "cli/reading.h"
#include "cli/verbs.h"
#include "espalier/base/error.h"
#include "espalier/base/units.h"
#include "espalier/grouping/inspection.h"
#include "espalier/grouping/prefix_tree.h"
#include "espalier/rollout/mini_batches.h"
#include "espalier/rollout/recorded_experts.h"
#include "espalier/services/rollout_text.h"

namespace espalier::cli {
namespace {

// Tokens computed under another --share than the whole trees that the inspection counts: steps share nothing.
std::int64_t physical_tokens(const std::vector<Rollout>& rollouts, ShareMode mode) {
  const bool all_have_steps =
      std::all_of(rollouts.begin(), rollouts.end(), [](const Rollout& r) { return r.step.has_value(); });
  std::int64_t tokens = 0;
  const auto add = [&](std::span<const Rollout> part) {
    for (const PrefixTree& tree : build_prefix_trees(part, mode)) tokens += tree.physical_tokens();
  };
  if (!all_have_steps) {
    add(rollouts);
    return tokens;
  }
  for (const std::vector<std::int64_t>& indices : cut_mini_batches(rollouts, 0)) {
    std::vector<Rollout> part;
    for (const std::int64_t index : indices) part.push_back(rollouts[static_cast<std::size_t>(index)]);
    add(part);
  }
  return tokens;
}

std::string one_line(const Json& text) {
  return text.is_string() ? Json(text).dump(-1, ' ', false, Json::error_handler_t::replace) : "(no text)";
}

// The first rollouts as text: what the records carry, else what the tokenizer of --model says.
void show_samples(Context& context, const std::vector<Rollout>& rollouts) {
  const auto count = std::min(rollouts.size(), static_cast<std::size_t>(context.options.show));
  std::vector<Rollout> shown(rollouts.begin(), rollouts.begin() + static_cast<std::ptrdiff_t>(count));
  const bool have_text = std::ranges::all_of(shown, [](const Rollout& rollout) {
    const Json carried = carried_fields(rollout);
    return carried.contains("prompt") && carried.contains("response");
  });
  if (!have_text && context.options.model.empty())
    throw OptionError({"--show", "records with text, or --model DIR for its tokenizer", "neither", "give --model DIR"});
  if (!have_text) {
    Tokenizer tokenizer(context.options.model);
    add_texts(shown, tokenizer);
  }
  for (const Rollout& rollout : shown) {
    const Json carried = carried_fields(rollout);
    Json sample{{"where", rollout.where}, {"prompt", carried["prompt"]}, {"response", carried["response"]}};
    if (rollout.reward) sample["reward"] = *rollout.reward;
    context.text << "\n" << rollout.where;
    if (rollout.reward) context.text << "  reward " << *rollout.reward;
    context.text << "\n  prompt    " << one_line(sample["prompt"]) << "\n  response  " << one_line(sample["response"])
                 << '\n';
    context.result["samples"].push_back(std::move(sample));
  }
}

}  // namespace

int run_inspect(Context& context) {
  RolloutFile file = read_for(context, context.arguments);
  for (Rollout& rollout : file.rollouts) sort_recorded_experts(rollout.recorded_experts);
  Inspection inspection = inspect_rollouts(file.rollouts);
  if (context.options.share != ShareMode::whole_trees)
    inspection.physical_tokens = physical_tokens(file.rollouts, context.options.share);
  context.result.update(inspection_json(inspection));
  context.result["format"] = file.format;
  context.result["bytes"] = file.bytes;
  context.text << "read              " << file.format << ", " << format_bytes(file.bytes) << '\n'
               << inspection_text(inspection);
  if (context.options.show > 0) show_samples(context, file.rollouts);
  return 0;
}

}  // namespace espalier::cli
