#include "espalier/step/step_path.h"

#include <algorithm>

#include "espalier/plan/memory_model.h"

namespace espalier {

StepPath::StepPath(const Decoder& decoder, const StepPlan& plan, bool with_gradients, Arena& arena,
                   const std::string& spill_dir) {
  const std::int64_t stored =
      path_bytes(decoder.block(), plan.max_path_rows, with_gradients, plan.path_layers_awake).stored;
  if (stored > 0) {
    const auto chunks = static_cast<int>(chunks_in_flight(stored));
    queue_.emplace(store_of(arena.device(), spill_dir), chunks, std::max(1, chunks / 4));
    queue_->reserve(stored);
    keeper_.emplace(arena, *queue_);
  }
  path_.emplace(decoder.shape(), plan.max_path_rows, decoder.dtype(), with_gradients, arena,
                keeper_ ? &*keeper_ : nullptr, plan.path_layers_awake);
}

}  // namespace espalier
