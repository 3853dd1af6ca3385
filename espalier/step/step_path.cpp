#include "espalier/step/step_path.h"

#include <algorithm>

#include "espalier/forecast/memory_model.h"
#include "espalier/saved/sharded_path.h"
#include "espalier/saved/sleeping_path.h"
#include "espalier/shape/path_leaves.h"

namespace espalier {

StepPath::StepPath(const Decoder& decoder, const StepPlan& plan, bool with_gradients, Arena& arena,
                   const std::string& spill_dir) {
  Group& cp = decoder.mesh().cp;
  const PathRows rows = plan.path_rows();
  const PathBytes bytes = path_bytes(decoder.sizes(), rows, with_gradients, plan.path, cp.size());
  if (bytes.stored > 0) {
    const auto chunks = static_cast<int>(chunks_in_flight(bytes.stored));
    queue_.emplace(store_of(arena.device(), spill_dir), chunks, std::max(1, chunks / 4));
    queue_->reserve(bytes.stored);
    keeper_ = std::make_unique<SleepingPath>(arena, *queue_);
  } else if (bytes.sleeps) {
    keeper_ = std::make_unique<ShardedPath>(decoder.sizes(), rows.all, with_gradients, plan.path.latents,
                                            decoder.dtype(), cp, arena);
  }
  path_.emplace(decoder.shape(), rows.all, decoder.dtype(), with_gradients, arena, keeper_.get(),
                plan.path.layers_awake, keeps_windows(decoder.shape(), cp.size()) ? rows.window : OpenPath::kAllRows,
                plan.path.latents && rows.all > 0);
}

}  // namespace espalier
