// All columns of a projected row are products with the row.
#include "espalier/mixers/recurrence/layer.h"
#include "espalier/mixers/delta_rule/shape.h"

namespace espalier {

extern const MixerLayer delta_rule_layer;
const MixerLayer delta_rule_layer = recurrence_layer<RecurrenceForward, RecurrenceBackward>();

}  // namespace espalier
