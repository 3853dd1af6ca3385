// A critic's values of a whole file of rollouts, for a run that goes on with them: espalier/values.safetensors, one
// float64 tensor `values`, one number for each response token in the order of training.
#pragma once

#include <filesystem>
#include <span>
#include <vector>

namespace espalier {

// `directory`: the critic's, with its espalier/ folder.
void save_values(const std::filesystem::path& directory, std::span<const double> values);
// Errors: InputError for a file that is missing or holds anything but such a tensor.
std::vector<double> load_values(const std::filesystem::path& directory);

}  // namespace espalier
