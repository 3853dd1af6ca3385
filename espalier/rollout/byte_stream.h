// Bytes in order, from a file, from memory, or unpacked from gzip or zstd: what a reader of rollouts reads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace espalier {

class ByteStream {
 public:
  virtual ~ByteStream() = default;
  // Fills up to `capacity` bytes; 0 only at the end. InputError naming the file where reading fails.
  virtual std::size_t read(char* out, std::size_t capacity) = 0;
  virtual std::int64_t consumed_bytes() const = 0;  // of the file, packed bytes where it is packed
};

// A file as it lies on disk, or what stdin gives where `path` is "-". InputError for what cannot be read: missing, a
// directory, no permission. `total_bytes` receives its size, 0 where it has none (a pipe).
std::unique_ptr<ByteStream> open_file_bytes(const std::string& path, std::int64_t& total_bytes);

// Text that outlives the stream.
std::unique_ptr<ByteStream> memory_bytes(std::string_view text);

// `stream` itself, or unpacked where its first bytes say gzip or zstd. Several members end to end are one
// text; a stream cut short or damaged is an InputError that names `name`.
std::unique_ptr<ByteStream> unpacked(std::unique_ptr<ByteStream> stream, const std::string& name);

}  // namespace espalier
