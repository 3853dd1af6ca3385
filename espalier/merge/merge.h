// A base model and a LoRA adapter (checkpoint/adapter.h) as one model directory.
#pragma once

#include <cstdint>
#include <filesystem>

#include "espalier/metrics/progress.h"
#include "espalier/options/options.h"

namespace espalier {

struct MergeReport {
  std::int64_t changed = 0, parameters = 0;  // tensors
  std::int64_t rank = 0;
  double scale = 0;
};

// Writes --out: the weights of --model with the adapter's change, computed in float64 and rounded once to --save-dtype.
// Tensors that the adapter does not change keep the bits of their file where its number format is written. Errors: as
// Adapter, load_parameters and write_model_directory; UnsupportedError for an adapter of a tied head.
MergeReport merge(const std::filesystem::path& adapter, const Options& options, Progress& progress);

}  // namespace espalier
