#include "espalier/config/stored_headers.h"

#include <fstream>
#include <iterator>
#include <utility>

namespace espalier {
namespace fs = std::filesystem;
namespace {

constexpr const char* kSingle = "model.safetensors";

Json parsed(const std::string& text) { return Json::parse(text, nullptr, false); }

bool is_of_vision(std::string_view name) {
  return name.find("vision_") != name.npos || name.find("visual.") != name.npos || name.find("audio_") != name.npos;
}

}  // namespace

// Discarded JSON if there is none (checkpoint/safetensors.h).
StoredHeaders::Header StoredHeaders::header_of(const fs::path& path) {
  constexpr std::uint64_t kMost = std::uint64_t{256} << 20;
  std::ifstream in(path, std::ios::binary);
  unsigned char length[8] = {};
  if (!in.read(reinterpret_cast<char*>(length), sizeof length)) return {parsed(""), 0};
  std::uint64_t bytes = 0;
  for (int i = 7; i >= 0; --i) bytes = bytes << 8 | length[i];
  std::error_code failed;
  if (bytes > kMost || bytes > fs::file_size(path, failed) || failed) return {parsed(""), 0};
  std::string text(bytes, ' ');
  in.read(text.data(), static_cast<std::streamsize>(bytes));
  return {parsed(text), bytes + sizeof length};
}

std::optional<StoredTensor> StoredHeaders::tensor_in(const fs::path& path, const Header& header,
                                                     const std::function<bool(std::string_view)>& accepts) {
  if (!header.tensors.is_object()) return {};
  for (const auto& [name, entry] : header.tensors.items()) {
    if (!accepts(name) || is_of_vision(name)) continue;
    const auto shape = entry.is_object() ? entry.find("shape") : entry.end();
    if (!entry.is_object() || shape == entry.end() || !shape->is_array()) return {};
    StoredTensor out{path, {}, {}, 0, 0};
    for (const Json& size : *shape)
      if (size.is_number_integer()) out.shape.push_back(size.get<std::int64_t>());
    if (out.shape.size() != shape->size()) return {};
    if (const auto dtype = entry.find("dtype"); dtype != entry.end() && dtype->is_string())
      out.dtype = dtype->get<std::string>();
    const auto offsets = entry.find("data_offsets");
    if (offsets != entry.end() && offsets->is_array() && offsets->size() == 2 && (*offsets)[0].is_number_unsigned() &&
        (*offsets)[1].is_number_unsigned())
      out.begin = header.bytes + (*offsets)[0].get<std::uint64_t>(),
      out.end = header.bytes + (*offsets)[1].get<std::uint64_t>();
    return out;
  }
  return {};
}

StoredHeaders::StoredHeaders(fs::path directory) : directory_(std::move(directory)) {
  const fs::path single = directory_ / kSingle, index = directory_ / "model.safetensors.index.json";
  std::error_code ignored;
  if (fs::exists(single, ignored)) {
    headers_[kSingle] = header_of(single);
  } else if (std::ifstream in(index, std::ios::binary); in) {
    Json json = parsed(std::string(std::istreambuf_iterator<char>(in), {}));
    if (json.is_object() && json.contains("weight_map") && json.at("weight_map").is_object())
      files_ = json.at("weight_map");
  }
}

std::vector<std::string> StoredHeaders::names() const {
  std::vector<std::string> out;
  const auto add = [&](const Json& tensors) {
    if (!tensors.is_object()) return;
    for (const auto& [name, entry] : tensors.items()) out.push_back(name);
  };
  add(files_);
  if (files_.is_null() && !headers_.empty()) add(headers_.begin()->second.tensors);
  return out;
}

std::optional<StoredTensor> StoredHeaders::matrix(const std::function<bool(std::string_view)>& accepts) {
  std::optional<StoredTensor> found = tensor(accepts);
  return found && found->shape.size() == 2 ? found : std::nullopt;
}

std::optional<StoredTensor> StoredHeaders::tensor(const std::function<bool(std::string_view)>& accepts) {
  if (files_.is_null()) {
    if (headers_.empty()) return {};
    return tensor_in(directory_ / kSingle, headers_.begin()->second, accepts);
  }
  for (const auto& [name, file] : files_.items()) {
    if (!accepts(name) || is_of_vision(name) || !file.is_string()) continue;
    const std::string path = file.get<std::string>();
    if (path.find('/') != path.npos) return {};
    if (!headers_.contains(path)) headers_[path] = header_of(directory_ / path);
    return tensor_in(directory_ / path, headers_[path], accepts);
  }
  return {};
}

}  // namespace espalier
