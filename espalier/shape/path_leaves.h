// The rows of a path that a layer leaves for rows below it.
#pragma once

#include <algorithm>

#include "espalier/base/dtype.h"
#include "espalier/shape/model_shape.h"

namespace espalier {

// True if layers with a window keep only the rows that it shows to rows below; these are then always in memory. Under
// cp above 1 layers keep all rows.
inline bool keeps_windows(const ModelShape& shape, std::int64_t cp) { return cp == 1 && shape.window() > 0; }

enum class PathLeaves : std::uint8_t { no_rows, window_rows, all_rows };
inline PathLeaves leaves(const Mixer& mixer, std::int64_t cp) {
  if (mixer.path_kinds(false).empty()) return PathLeaves::no_rows;
  return cp == 1 && mixer.window() > 0 ? PathLeaves::window_rows : PathLeaves::all_rows;
}

// K and V of one prefix token over all layers of attention: 2 L J D b (mathematics, section 10).
inline std::int64_t kv_bytes_per_token(const ModelShape& shape, DType dtype) {
  std::int64_t numbers = 0;
  for (const LayerShape& layer : shape.layer)
    for (const PathKind& kind : layer.mixer->path_kinds(false)) numbers += kind.width;
  return numbers * bytes_of(dtype);
}

// True if some layer may leave latents in place of keys and values; and if the path may be carried as these, which
// windows exclude.
inline bool narrows_path(const ModelShape& shape) {
  return std::ranges::any_of(shape.layer, [](const LayerShape& layer) { return layer.mixer->narrows_path(); });
}
inline bool may_carry_latents(const ModelShape& shape) { return narrows_path(shape) && shape.window() == 0; }

}  // namespace espalier
