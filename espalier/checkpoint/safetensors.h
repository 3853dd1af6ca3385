// The safetensors format: 8 bytes header length (little endian), a JSON header, then the data of all tensors without
// holes. Source: the format's description in its public repository, huggingface/safetensors.
//
// The reader maps the file and trusts nothing: every number of the header is checked against the file before a pointer
// is returned. The writer's bytes depend on its arguments only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "espalier/base/dtype.h"

namespace espalier {

class OutputFile;
namespace quantised {
class Matrix;
}

enum class TensorType { F64, F32, F16, BF16, I64, I32, I16, I8, U64, U32, U16, U8, BOOL, F8_E4M3, F8_E5M2, F8_E8M0 };
std::int64_t bytes_of(TensorType type);
const char* name_of(TensorType type);
TensorType tensor_type_of(DType dtype);

// "[512, 64]"
std::string shape_text(const std::vector<std::int64_t>& shape);

// A name from a file, fit for a message: control characters as '?', cut after 120 bytes.
std::string printable(std::string_view name);

struct SafetensorsEntry {
  std::string name;
  TensorType type = TensorType::F32;
  std::vector<std::int64_t> shape;
  std::int64_t count = 0;  // elements
  std::int64_t bytes = 0;
  const std::byte* data = nullptr;  // in the mapped file; not necessarily aligned. Null where `unpack` is set
  // Overwrites `bytes` bytes with the values, where they are spread over another tensor (checkpoint/packed_experts.h).
  std::function<void(std::byte* out)> unpack = {};
  std::shared_ptr<const quantised::Matrix> quantised = {};  // what `unpack` reads, of a matrix in few bits
};

// The entry's values, contiguous: in the file, or in `room`, which is overwritten.
const std::byte* values_of(const SafetensorsEntry& entry, std::vector<std::byte>& room);

// Releases the pages of the mapped file that hold only this entry's data. Later reads load them again from the
// file.
void forget_pages(const SafetensorsEntry& entry);

class SafetensorsFile {
 public:
  // Errors: InputError with the path, the tensor, what was expected and found, for every violation of the format:
  // truncated or too long, header not JSON, unknown or repeated member, negative or overflowing shape, size that is
  // not the product, overlap, hole.
  explicit SafetensorsFile(std::filesystem::path path);
  SafetensorsFile(SafetensorsFile&& other) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&&) = delete;
  SafetensorsFile(const SafetensorsFile&) = delete;
  ~SafetensorsFile();

  const std::filesystem::path& path() const { return path_; }
  const std::vector<SafetensorsEntry>& entries() const { return entries_; }  // in the order of their data
  const SafetensorsEntry* find(const std::string& name) const;               // null when absent
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

 private:
  void map_file();
  void place_entries(const std::vector<std::pair<std::uint64_t, std::uint64_t>>& offsets, std::uint64_t header_bytes);

  std::filesystem::path path_;
  const std::byte* map_ = nullptr;
  std::size_t map_bytes_ = 0;
  std::vector<SafetensorsEntry> entries_;
  std::unordered_map<std::string, std::size_t> index_;
  std::map<std::string, std::string> metadata_;
};

struct TensorSpec {
  std::string name;
  TensorType type = TensorType::F32;
  std::vector<std::int64_t> shape;
};

// Writes the header at once, then takes the data of the tensors in the order of the list, in pieces of any size.
class SafetensorsWriter {
 public:
  SafetensorsWriter(OutputFile& output, const std::vector<TensorSpec>& tensors,
                    const std::map<std::string, std::string>& metadata = {{"format", "pt"}});
  void append(const void* data, std::int64_t bytes);
  void finish();  // InternalError unless exactly the announced bytes were appended; the caller closes the output

 private:
  OutputFile& output_;
  std::int64_t missing_bytes_ = 0;
};

}  // namespace espalier
