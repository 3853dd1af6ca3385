// The gated delta rule (Qwen3-Next, Qwen3.5): each row corrects a state, a matrix per value head, by what the state
// said of its key (ops/delta_rule.h). As in "Gated Delta Networks" (arXiv 2412.06464), with q, k, v behind a short
// convolution and a gated norm behind the state.
#pragma once

#include "espalier/mixers/recurrence/shape.h"

namespace espalier {

struct LayerShape;

class DeltaRule final : public Recurrence {
 public:
  enum Products : std::size_t { projected, output };

  explicit DeltaRule(RecurrenceShape of_shape) : Recurrence(MixerKind::delta_rule, of_shape) {}

  PartParameters parameters(std::int64_t hidden) const override;
  std::size_t output_product() const override { return output; }
  std::shared_ptr<const Mixer> part(std::int64_t ranks) const override;
};

// Gives a delta rule to the layers that a config calls linear_attention, and without layer_types to all but each
// full_attention_interval-th. `by_key_head`: the matrices of files are by key head (Qwen3-Next).
void read_delta_rule(const Members& config, std::vector<LayerShape>& layers);
void read_delta_rule_by_key_head(const Members& config, std::vector<LayerShape>& layers);

}  // namespace espalier
