#include "espalier/config/stored_sizes.h"

#include <cstdint>
#include <string_view>
#include <vector>

#include "espalier/config/stored_headers.h"

namespace espalier {
namespace fs = std::filesystem;
namespace {

using Shape = std::vector<std::int64_t>;

// Empty where there is none.
Shape shape_of(StoredHeaders& headers, std::string_view end) {
  const auto found = headers.matrix([&](std::string_view name) { return name.ends_with(end); });
  return found ? found->shape : Shape();
}

std::int64_t count_in(const Json& config, const char* member) {
  const auto found = config.find(member);
  return found != config.end() && found->is_number_integer() ? found->get<std::int64_t>() : 0;
}

void add_sizes(const fs::path& directory, Json& config) {
  constexpr const char *kHeadDim = "head_dim", *kKeyValueHeads = "num_key_value_heads";
  const bool head_dim_absent = !config.contains(kHeadDim) || config.at(kHeadDim).is_null(),
             heads_absent = !config.contains(kKeyValueHeads);  // null says that there are as many as heads
  const std::int64_t heads = count_in(config, "num_attention_heads"), hidden = count_in(config, "hidden_size");
  if ((!head_dim_absent && !heads_absent) || heads <= 0 || hidden <= 0) return;
  StoredHeaders headers(directory);
  if (!shape_of(headers, ".kv_a_proj_with_mqa.weight").empty()) return;
  const Shape output = shape_of(headers, ".o_proj.weight"), keys = shape_of(headers, ".k_proj.weight");
  if (output.size() != 2 || output[0] != hidden || output[1] <= 0 || output[1] % heads != 0) return;
  const std::int64_t head_dim = output[1] / heads;
  if (head_dim_absent) config[kHeadDim] = head_dim;
  const bool fits = keys.size() == 2 && keys[1] == hidden && keys[0] > 0 && keys[0] % head_dim == 0 &&
                    count_in(config, kHeadDim) == head_dim;
  if (heads_absent && fits) config[kKeyValueHeads] = keys[0] / head_dim;
}

}  // namespace

void add_stored_sizes(const fs::path& directory, Json& config) {
  if (!config.is_object()) return;
  const auto text = config.find("text_config");
  add_sizes(directory, text != config.end() && text->is_object() ? *text : config);
}

}  // namespace espalier
