// All columns of a projected row are products with the row.
#include "espalier/mixers/recurrence/layer.h"
#include "espalier/mixers/mamba2/shape.h"

namespace espalier {

extern const MixerLayer mamba2_layer;
const MixerLayer mamba2_layer = recurrence_layer<RecurrenceForward, RecurrenceBackward>();

}  // namespace espalier
