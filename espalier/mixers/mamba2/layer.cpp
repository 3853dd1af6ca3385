// All columns of a projected row are products with the row.
#include "espalier/mixers/recurrence/layer.h"
#include "espalier/mixers/mamba2/shape.h"

namespace espalier {
namespace {

// Nemotron-H's heads: 8 share a group's B and C.
Mamba2 usual(std::int64_t groups) {
  RecurrenceShape s;
  s.mamba = true;
  s.key_heads = groups, s.value_heads = 8 * groups, s.key_dim = 128, s.value_dim = 64, s.kernel = 4;
  return Mamba2(s);
}

}  // namespace

extern const MixerLayer mamba2_layer;
const MixerLayer mamba2_layer = recurrence_layer<RecurrenceForward, RecurrenceBackward, usual>();

}  // namespace espalier
