#include "espalier/shape/stored_sizes.h"

#include <cstdint>
#include <fstream>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace espalier {
namespace fs = std::filesystem;
namespace {

using Shape = std::vector<std::int64_t>;

Json parsed(const std::string& text) { return Json::parse(text, nullptr, false); }

// The header of a safetensors file (checkpoint/safetensors.h); discarded JSON if there is none.
Json header_of(const fs::path& path) {
  constexpr std::uint64_t kMost = std::uint64_t{256} << 20;
  std::ifstream in(path, std::ios::binary);
  unsigned char length[8] = {};
  if (!in.read(reinterpret_cast<char*>(length), sizeof length)) return parsed("");
  std::uint64_t bytes = 0;
  for (int i = 7; i >= 0; --i) bytes = bytes << 8 | length[i];
  std::error_code failed;
  if (bytes > kMost || bytes > fs::file_size(path, failed) || failed) return parsed("");
  std::string text(bytes, ' ');
  in.read(text.data(), static_cast<std::streamsize>(bytes));
  return parsed(text);
}

bool is_of_vision(std::string_view name) {
  return name.find("vision_") != name.npos || name.find("visual.") != name.npos;
}

// The first matrix of the text model whose name ends so; empty where there is none.
Shape matrix_in(const Json& header, std::string_view end) {
  if (!header.is_object()) return {};
  for (const auto& [name, entry] : header.items()) {
    if (!std::string_view(name).ends_with(end) || is_of_vision(name)) continue;
    const auto shape = entry.is_object() ? entry.find("shape") : entry.end();
    if (!entry.is_object() || shape == entry.end() || !shape->is_array() || shape->size() != 2) return {};
    Shape out;
    for (const Json& size : *shape)
      if (size.is_number_integer()) out.push_back(size.get<std::int64_t>());
    return out.size() == 2 ? out : Shape();
  }
  return {};
}

// The weights of a directory, in one file or in shards that an index names.
class Weights {
 public:
  explicit Weights(fs::path directory) : directory_(std::move(directory)) {
    const fs::path single = directory_ / "model.safetensors", index = directory_ / "model.safetensors.index.json";
    std::error_code ignored;
    if (fs::exists(single, ignored)) {
      headers_["model.safetensors"] = header_of(single);
    } else if (std::ifstream in(index, std::ios::binary); in) {
      Json json = parsed(std::string(std::istreambuf_iterator<char>(in), {}));
      if (json.is_object() && json.contains("weight_map") && json.at("weight_map").is_object())
        files_ = json.at("weight_map");
    }
  }

  Shape matrix(std::string_view end) {
    if (files_.is_null()) return headers_.empty() ? Shape() : matrix_in(headers_.begin()->second, end);
    for (const auto& [name, file] : files_.items()) {
      if (!std::string_view(name).ends_with(end) || is_of_vision(name) || !file.is_string()) continue;
      const std::string path = file.get<std::string>();
      if (path.find('/') != path.npos) return {};
      if (!headers_.contains(path)) headers_[path] = header_of(directory_ / path);
      return matrix_in(headers_[path], end);
    }
    return {};
  }

 private:
  fs::path directory_;
  Json files_;
  std::map<std::string, Json> headers_;
};

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
  Weights weights(directory);
  if (!weights.matrix(".kv_a_proj_with_mqa.weight").empty()) return;
  const Shape output = weights.matrix(".o_proj.weight"), keys = weights.matrix(".k_proj.weight");
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
