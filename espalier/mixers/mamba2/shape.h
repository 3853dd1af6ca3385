// Mamba-2 (arXiv 2405.21060): a state decays and is written without being read first, by a step of each head
// (ops/delta_rule.h). Rows are gated before the norm behind the state.
#pragma once

#include "espalier/mixers/recurrence/shape.h"

namespace espalier {

struct LayerShape;

class Mamba2 final : public Recurrence {
 public:
  enum Products : std::size_t { projected, output };

  explicit Mamba2(RecurrenceShape of_shape) : Recurrence(MixerKind::mamba2, of_shape) {}

  PartParameters parameters(std::int64_t hidden) const override;
  std::size_t output_product() const override { return output; }
  std::shared_ptr<const Mixer> part(std::int64_t ranks) const override;
};

// Gives Mamba-2 to all layers outside attn_layer_indices (Bamba); to layers that layer_types calls mamba or
// linear_attention, all where it is absent (Granite 4); to layers of Nemotron-H's pattern (shape/half_blocks.h). The
// last has other names for its members, too.
void read_bamba(const Members& config, std::vector<LayerShape>& layers);
void read_granite_hybrid(const Members& config, std::vector<LayerShape>& layers);
void read_nemotron_h(const Members& config, std::vector<LayerShape>& layers);

}  // namespace espalier
