// Kimi delta attention (Kimi Linear, arXiv 2510.26692): the gated delta rule with a decay for each key channel of a
// head, and as many key heads as value heads. Gates and decays are projected through narrow latents.
#pragma once

#include "espalier/mixers/recurrence/shape.h"

namespace espalier {

struct LayerShape;

class KimiDelta final : public Recurrence {
 public:
  enum Products : std::size_t { projected, gate_latents, gate_z, gate_a, output };

  explicit KimiDelta(RecurrenceShape of_shape) : Recurrence(MixerKind::kimi_delta, of_shape) {}

  PartParameters parameters(std::int64_t hidden) const override;
  std::size_t output_product() const override { return output; }
  std::shared_ptr<const Mixer> part(std::int64_t ranks) const override;
};

// Gives it to the layers that a config calls linear_attention, and without layer_types to all but each fourth after the
// first. Latents are as wide as a head.
void read_kimi_delta(const Members& config, std::vector<LayerShape>& layers);

}  // namespace espalier
