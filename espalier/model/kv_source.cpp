#include "espalier/model/kv_source.h"

#include <ATen/core/Tensor.h>

#include "espalier/base/error.h"

namespace espalier {

KeysValues KvSource::kept(std::int64_t) const { return {}; }
KeysValues KvSource::gathered(std::int64_t) const { return {}; }

void KvSource::add_backward(const LayerAttention&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                            const at::Tensor&, const KeysValues&) {
  ESPALIER_INTERNAL(false, "a backward over keys and values that are only read");
}

}  // namespace espalier
