#include "espalier/plan/recorded_experts_fit.h"

#include <algorithm>

#include "espalier/base/error.h"
#include "espalier/grouping/prefix_tree.h"
#include "espalier/rollout/recorded_experts.h"

namespace espalier {
namespace {

[[noreturn]] void refuse(const Rollout& rollout, const std::string& expected, const std::string& got) {
  throw InputError({rollout.where + ": routed_experts", expected, got,
                    "Was this rollout made with another model? Without the field, tokens are routed freely"});
}

// Keeps the layers with experts of records that hold all layers.
void drop_dense_layers(RecordedExperts& experts, const ModelShape& shape, std::int64_t expert_layers) {
  std::vector<std::uint16_t> kept;
  const auto chosen = static_cast<std::size_t>(experts.chosen), layers = static_cast<std::size_t>(experts.layers);
  kept.reserve(static_cast<std::size_t>(experts.tokens) * static_cast<std::size_t>(expert_layers) * chosen);
  for (std::size_t i = 0; i < experts.ids.size() / chosen; ++i)
    if (shape.has_experts(static_cast<std::int64_t>(i % layers)))
      kept.insert(kept.end(), experts.ids.begin() + static_cast<std::ptrdiff_t>(i * chosen),
                  experts.ids.begin() + static_cast<std::ptrdiff_t>((i + 1) * chosen));
  experts.ids = std::move(kept);
  experts.layers = static_cast<std::int32_t>(expert_layers);
}

// A layer's experts are distinct: zeros throughout stand for a layer without a record.
void free_zeros(RecordedExperts& experts) {
  if (experts.chosen < 2) return;
  for (auto layer = experts.ids.begin(); layer != experts.ids.end(); layer += experts.chosen)
    if (std::all_of(layer, layer + experts.chosen, [](std::uint16_t id) { return id == 0; }))
      std::fill(layer, layer + experts.chosen, RecordedExperts::kFree);
}

std::int64_t prompt_tokens(const std::vector<PrefixTree>& trees, std::span<const Rollout> rollouts) {
  std::int64_t sum = 0;
  for (const PrefixTree& tree : trees)
    for (const PrefixNode& node : tree.nodes) {
      const std::int32_t prompt = rollouts[static_cast<std::size_t>(node.rollout)].prompt_length();
      sum += std::max(0, std::min(node.end, prompt) - node.begin);
    }
  return sum;
}

}  // namespace

void fit_recorded_experts(std::vector<Rollout>& rollouts, const ModelShape& shape) {
  const std::int64_t expert_layers = shape.expert_layers();
  for (Rollout& rollout : rollouts) {
    RecordedExperts& experts = rollout.recorded_experts;
    if (experts.tokens == 0) continue;
    if (shape.experts == 0) refuse(rollout, "no experts, because the model has none", "some");
    if (experts.layers != expert_layers && experts.layers != shape.layers())
      refuse(rollout,
             expert_layers == shape.layers()
                 ? text_of(shape.layers(), " layers per token")
                 : text_of(expert_layers, " layers per token (those with experts) or ", shape.layers(), " (all)"),
             text_of(experts.layers));
    if (experts.chosen != shape.experts_per_token)
      refuse(rollout, text_of(shape.experts_per_token, " experts per token and layer"), text_of(experts.chosen));
    if (experts.layers != expert_layers) drop_dense_layers(experts, shape, expert_layers);
    free_zeros(experts);
    sort_recorded_experts(experts);
    for (auto layer = experts.ids.begin(); layer != experts.ids.end(); layer += experts.chosen) {
      if (*layer == RecordedExperts::kFree) continue;
      const auto end = layer + experts.chosen;  // ascending
      if (*(end - 1) >= shape.experts)
        refuse(rollout, text_of("experts in [0, ", shape.experts, ")"), text_of(*(end - 1)));
      if (const auto twice = std::adjacent_find(layer, end); twice != end)
        refuse(rollout, "distinct experts per token and layer", text_of(*twice, " twice"));
    }
  }
}

std::string recorded_experts_note(std::span<const Rollout> rollouts) {
  const auto recorded =
      std::count_if(rollouts.begin(), rollouts.end(), [](auto& r) { return r.recorded_experts.tokens > 0; });
  if (recorded == 0) return {};
  std::vector<Rollout> without(rollouts.size());
  for (std::size_t i = 0; i < rollouts.size(); ++i) {
    without[i].prompt_ids = rollouts[i].prompt_ids;
    without[i].response_ids = rollouts[i].response_ids;
  }
  const std::int64_t parted = prompt_tokens(build_prefix_trees(rollouts, ShareMode::whole_trees), rollouts) -
                              prompt_tokens(build_prefix_trees(without, ShareMode::whole_trees), without);
  std::string note = text_of("routed_experts of ", recorded, " of ", rollouts.size(), " rollouts are chosen again");
  if (parted > 0)
    note += text_of("; they differ between rollouts on ", parted,
                    " prompt tokens, which are not shared: a prefix ends where recorded experts differ");
  return note;
}

}  // namespace espalier
