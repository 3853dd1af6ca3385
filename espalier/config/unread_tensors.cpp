#include "espalier/config/unread_tensors.h"

#include <cstdint>
#include <fstream>
#include <iterator>

#include "espalier/base/error.h"
#include "espalier/base/json.h"

namespace espalier {

std::vector<std::string> unread_modules(const std::filesystem::path& directory) {
  std::vector<std::string> out;
  std::ifstream in(directory / "config.json", std::ios::binary);
  const Json config = Json::parse(std::string(std::istreambuf_iterator<char>(in), {}), nullptr, false);
  if (!config.is_object()) return out;
  const auto found = config.find("text_config");
  const Json& text = found != config.end() && found->is_object() ? *found : config;
  const auto count = [&](const char* member) {
    const auto value = text.find(member);
    return value != text.end() && value->is_number_integer() ? value->get<std::int64_t>() : 0;
  };
  const std::int64_t layers = count("num_hidden_layers"), readers = count("num_kv_shared_layers");
  if (readers >= layers) return out;
  for (std::int64_t layer = layers - readers; layer < layers; ++layer)
    for (const char* const module : {"k_proj", "v_proj", "k_norm", "v_norm"})
      out.push_back(text_of("layers.", layer, ".self_attn.", module, "."));
  return out;
}

}  // namespace espalier
