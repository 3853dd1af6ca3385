#include "espalier/config/stored_names.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "espalier/config/stored_headers.h"

namespace espalier {

void set_stored_names(const std::filesystem::path& directory, ModelShape& shape) {
  const std::vector<std::string> stored = StoredHeaders(directory).names();
  const auto any = [&](auto&& accepts) { return std::ranges::any_of(stored, accepts); };
  const auto begins = [&](std::string_view prefix) {
    return any([=](const std::string& name) { return name.starts_with(prefix); });
  };
  const auto ends = [&](std::string_view ending) {
    return any([=](const std::string& name) { return name.ends_with(ending); });
  };
  if (stored.empty()) return;
  ParameterNames& names = shape.names;
  if (names.expert_files == ExpertFiles::each && ends(".experts.down_proj")) names.expert_files = ExpertFiles::stacked;
  if (names.half_blocks && !begins(names.file_root)) names.file_root = "model.";
  for (const char* root : {"model.language_model.", "language_model.model."})
    if (begins(root)) names.file_root = root;
  if (begins("language_model.lm_head.")) names.file_head = "language_model.lm_head";
  names.dense_below_experts = ends(".block_sparse_moe.gate_proj.weight");
}

}  // namespace espalier
