// Headers of the safetensors files in a model directory: names, shapes and places of its tensors.
//
// For what config.json leaves out or contradicts. Unreadable files count as absent; the loader (checkpoint/) reports
// what is wrong with them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "espalier/base/json.h"

namespace espalier {

struct StoredTensor {
  std::filesystem::path file;
  std::string dtype;  // as safetensors has it: "BF16"
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0, end = 0;  // bytes of the file
};

class StoredHeaders {
 public:
  // Reads model.safetensors, or the files that model.safetensors.index.json names.
  explicit StoredHeaders(std::filesystem::path directory);

  // All tensors.
  std::vector<std::string> names() const;

  // The first tensor of the text model whose name is accepted; `matrix`: where it has two dimensions.
  std::optional<StoredTensor> tensor(const std::function<bool(std::string_view)>& accepts);
  std::optional<StoredTensor> matrix(const std::function<bool(std::string_view)>& accepts);

 private:
  struct Header {
    Json tensors;
    std::uint64_t bytes = 0;  // before the first tensor
  };
  static Header header_of(const std::filesystem::path& path);
  static std::optional<StoredTensor> tensor_in(const std::filesystem::path& path, const Header& header,
                                               const std::function<bool(std::string_view)>& accepts);

  std::filesystem::path directory_;
  Json files_;  // of an index: name -> file
  std::map<std::string, Header> headers_;
};

}  // namespace espalier
