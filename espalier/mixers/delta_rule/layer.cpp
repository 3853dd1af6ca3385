// All columns of a projected row are products with the row.
#include "espalier/mixers/recurrence/layer.h"
#include "espalier/mixers/delta_rule/shape.h"

namespace espalier {
namespace {

// Qwen3-Next's heads.
DeltaRule usual(std::int64_t heads) {
  RecurrenceShape s;
  s.key_heads = heads, s.value_heads = 2 * heads, s.key_dim = s.value_dim = 128, s.kernel = 4;
  return DeltaRule(s);
}

}  // namespace

extern const MixerLayer delta_rule_layer;
const MixerLayer delta_rule_layer = recurrence_layer<RecurrenceForward, RecurrenceBackward, usual>();

}  // namespace espalier
