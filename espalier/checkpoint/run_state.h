// State for exact continuation besides the weights, in the folder espalier/ of an output directory:
//   state.json         position, random state, options, what model and number formats it belongs to
//   state.safetensors  master.<name>, exp_avg.<name>, exp_avg_sq.<name> for every parameter, in the accumulators' dtype
// Saving and loading move bits, not values.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include "espalier/base/dtype.h"
#include "espalier/model/parameters.h"
#include "espalier/parallel/sum_order.h"
#include "espalier/shape/fingerprint.h"

namespace espalier {

struct RunState {
  std::int64_t step = 0;                // optimizer steps done
  std::int64_t epoch = 0;               // where the data continues: this epoch,
  std::int64_t mini_batch = 0;          // this mini-batch of it, not yet trained on
  std::string random_state;             // printable, as the generator writes itself
  std::string options = "{}";           // the resolved options, a JSON object
  std::string extra = "{}";             // whatever else the caller continues from, a JSON object
  std::string model;                    // fingerprint_of the model's shape
  DType dtype = DType::float32;         // the run's weights and activations
  DType accumulators = DType::float32;  // masters and moments: float32 or float64
  std::optional<SumOrder> sum_order;    // of a run whose ranks summed by NCCL
};

// Writes espalier/state.json and espalier/state.safetensors into an existing directory, usually
// AtomicDirectory::path(). masters, first and second moments: table.size() elements of state.accumulators each.
// Errors: OptionError when the output fails.
void save_run_state(const std::filesystem::path& directory, const RunState& state, const ParameterTable& table,
                    const void* masters, const void* first_moments, const void* second_moments);
// The same from whole parameters, asked for one after another: all masters, all first moments, all second moments.
using RunStateValues = std::array<ParameterValues, 3>;
void save_run_state(const std::filesystem::path& directory, const RunState& state, const ParameterTable& table,
                    const RunStateValues& values);

// state.json alone, checked. Errors: InputError with the file and the member that is missing or wrong.
RunState read_run_state(const std::filesystem::path& directory);

// Checks state.json against the model and the accumulators' dtype, then state.safetensors completely, then overwrites
// the three buffers. Errors: InputError: no checkpoint, truncated, of another model, number format or version, or two
// files of different steps.
RunState load_run_state(const std::filesystem::path& directory, const std::string& model, const ParameterTable& table,
                        DType accumulators, void* masters, void* first_moments, void* second_moments);
// The same, with `take` given every parameter's values (not necessarily aligned): part 0 masters, 1 first, 2 second
// moments.
using TakeStateValues = std::function<void(std::size_t part, const Parameter& parameter, const std::byte* values)>;
RunState load_run_state(const std::filesystem::path& directory, const std::string& model, const ParameterTable& table,
                        DType accumulators, const TakeStateValues& take);

}  // namespace espalier
