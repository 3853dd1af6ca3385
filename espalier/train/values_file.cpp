#include "espalier/train/values_file.h"

#include <algorithm>
#include <span>

#include "espalier/base/atomic_file.h"
#include "espalier/base/error.h"
#include "espalier/checkpoint/safetensors.h"

namespace espalier {
namespace {

std::filesystem::path file_in(const std::filesystem::path& directory) {
  return directory / "espalier" / "values.safetensors";
}

}  // namespace

void save_values(const std::filesystem::path& directory, std::span<const double> values) {
  OutputFile output(file_in(directory));
  SafetensorsWriter writer(output, {{"values", TensorType::F64, {static_cast<std::int64_t>(values.size())}}});
  writer.append(values.data(), static_cast<std::int64_t>(values.size_bytes()));
  writer.finish();
  output.close_synced();
}

std::vector<double> load_values(const std::filesystem::path& directory) {
  const SafetensorsFile file(file_in(directory));
  const SafetensorsEntry* entry = file.find("values");
  if (entry == nullptr || entry->type != TensorType::F64)
    throw InputError({file.path().string(), "a float64 tensor 'values'", entry ? name_of(entry->type) : "none",
                      "The checkpoint is damaged; continue from another one"});
  std::vector<double> values(static_cast<std::size_t>(entry->count));
  std::copy_n(entry->data, entry->bytes, std::as_writable_bytes(std::span(values)).data());
  return values;
}

}  // namespace espalier
