#include "espalier/rollout/byte_stream.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <vector>

#include "espalier/base/error.h"

namespace espalier {
namespace {

constexpr std::size_t kPackedBlock = 256 << 10;

class FileBytes : public ByteStream {
 public:
  FileBytes(std::string path, int descriptor) : path_(std::move(path)), descriptor_(descriptor) {}
  FileBytes(const FileBytes&) = delete;
  FileBytes& operator=(const FileBytes&) = delete;
  ~FileBytes() override { ::close(descriptor_); }

  std::size_t read(char* out, std::size_t capacity) override {
    ssize_t got = 0;
    do got = ::read(descriptor_, out, capacity);
    while (got < 0 && errno == EINTR);
    if (got < 0) throw InputError({path_, "a readable file", std::strerror(errno), "Check the file and its disk"});
    consumed_ += got;
    return static_cast<std::size_t>(got);
  }
  std::int64_t consumed_bytes() const override { return consumed_; }

 private:
  std::string path_;
  int descriptor_;
  std::int64_t consumed_ = 0;
};

class MemoryBytes : public ByteStream {
 public:
  explicit MemoryBytes(std::string_view text) : text_(text) {}
  std::size_t read(char* out, std::size_t capacity) override {
    const std::size_t bytes = std::min(capacity, text_.size() - consumed_);
    if (bytes > 0) std::memcpy(out, text_.data() + consumed_, bytes);
    consumed_ += bytes;
    return bytes;
  }
  std::int64_t consumed_bytes() const override { return static_cast<std::int64_t>(consumed_); }

 private:
  std::string_view text_;
  std::size_t consumed_ = 0;
};

// The first bytes, which were read to look at them, then the rest.
class ResumedBytes : public ByteStream {
 public:
  ResumedBytes(std::string first, std::unique_ptr<ByteStream> rest)
      : first_(std::move(first)), rest_(std::move(rest)) {}
  std::size_t read(char* out, std::size_t capacity) override {
    if (given_ == first_.size()) return rest_->read(out, capacity);
    const std::size_t bytes = std::min(capacity, first_.size() - given_);
    std::memcpy(out, first_.data() + given_, bytes);
    given_ += bytes;
    return bytes;
  }
  std::int64_t consumed_bytes() const override { return rest_->consumed_bytes(); }

 private:
  std::string first_;
  std::size_t given_ = 0;
  std::unique_ptr<ByteStream> rest_;
};

class GzipBytes : public ByteStream {
 public:
  GzipBytes(std::unique_ptr<ByteStream> packed, std::string name)
      : packed_(std::move(packed)), name_(std::move(name)), block_(kPackedBlock) {
    constexpr int kGzipOnly = 16 + MAX_WBITS;
    ESPALIER_INTERNAL_EQ(inflateInit2(&inflater_, kGzipOnly), Z_OK);
  }
  GzipBytes(const GzipBytes&) = delete;
  GzipBytes& operator=(const GzipBytes&) = delete;
  ~GzipBytes() override { inflateEnd(&inflater_); }

  std::size_t read(char* out, std::size_t capacity) override {
    inflater_.next_out = reinterpret_cast<Bytef*>(out);
    inflater_.avail_out = static_cast<uInt>(std::min<std::size_t>(capacity, 1 << 30));
    const uInt asked = inflater_.avail_out;
    while (inflater_.avail_out == asked) {
      if (inflater_.avail_in == 0 && !refill()) {
        if (inside_member_) throw damaged("the end of the file in the middle of the compressed data");
        return 0;
      }
      if (!inside_member_) {
        if (inflateReset(&inflater_) != Z_OK) throw damaged("an error of zlib at the start");
        inside_member_ = true;
      }
      const int status = inflate(&inflater_, Z_NO_FLUSH);
      if (status == Z_STREAM_END)
        inside_member_ = false;
      else if (status != Z_OK && status != Z_BUF_ERROR)
        throw damaged(inflater_.msg ? inflater_.msg : "data that zlib cannot decompress");
    }
    return asked - inflater_.avail_out;
  }
  std::int64_t consumed_bytes() const override { return packed_->consumed_bytes(); }

 private:
  bool refill() {
    inflater_.next_in = reinterpret_cast<Bytef*>(block_.data());
    inflater_.avail_in = static_cast<uInt>(packed_->read(block_.data(), block_.size()));
    return inflater_.avail_in > 0;
  }
  InputError damaged(const std::string& got) const {
    return InputError({name_, "a complete gzip file", got, "It was cut short or damaged; copy or write it again"});
  }

  std::unique_ptr<ByteStream> packed_;
  std::string name_;
  std::vector<char> block_;
  z_stream inflater_{};
  bool inside_member_ = false;
};

class ZstdBytes : public ByteStream {
 public:
  ZstdBytes(std::unique_ptr<ByteStream> packed, std::string name)
      : packed_(std::move(packed)), name_(std::move(name)), block_(kPackedBlock), context_(ZSTD_createDCtx()) {
    if (!context_) throw std::bad_alloc();
  }

  std::size_t read(char* out, std::size_t capacity) override {
    ZSTD_outBuffer text{out, capacity, 0};
    while (text.pos == 0 && capacity > 0) {
      if (input_.pos == input_.size && !refill()) {
        if (inside_frame_) throw damaged("the end of the file in the middle of the compressed data");
        return 0;
      }
      const std::size_t left = ZSTD_decompressStream(context_.get(), &text, &input_);
      if (ZSTD_isError(left) != 0) throw damaged(ZSTD_getErrorName(left));
      inside_frame_ = left != 0;
    }
    return text.pos;
  }
  std::int64_t consumed_bytes() const override { return packed_->consumed_bytes(); }

 private:
  struct Free {
    void operator()(ZSTD_DCtx* context) const { ZSTD_freeDCtx(context); }
  };

  bool refill() {
    input_ = {block_.data(), packed_->read(block_.data(), block_.size()), 0};
    return input_.size > 0;
  }
  InputError damaged(const std::string& got) const {
    return InputError({name_, "a complete zstd file", got, "It was cut short or damaged; copy or write it again"});
  }

  std::unique_ptr<ByteStream> packed_;
  std::string name_;
  std::vector<char> block_;
  std::unique_ptr<ZSTD_DCtx, Free> context_;
  ZSTD_inBuffer input_{nullptr, 0, 0};
  bool inside_frame_ = false;
};

}  // namespace

std::unique_ptr<ByteStream> open_file_bytes(const std::string& path, std::int64_t& total_bytes) {
  const bool standard_input = path == "-";
  const int descriptor = standard_input ? ::dup(STDIN_FILENO) : ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) {
    const std::string remedy = errno == ENOENT ? "Check the path" : "Check its permissions";
    throw InputError({path, "a readable file", std::strerror(errno), remedy});
  }
  auto stream = std::make_unique<FileBytes>(path, descriptor);
  struct stat status {};
  if (::fstat(descriptor, &status) != 0) throw InputError({path, "a readable file", std::strerror(errno), ""});
  if (S_ISDIR(status.st_mode))
    throw InputError({path, "a file of rollouts", "a directory", "Give the files in it, such as DIR/*.jsonl"});
  total_bytes = S_ISREG(status.st_mode) ? static_cast<std::int64_t>(status.st_size) : 0;
  return stream;
}

std::unique_ptr<ByteStream> memory_bytes(std::string_view text) { return std::make_unique<MemoryBytes>(text); }

std::unique_ptr<ByteStream> unpacked(std::unique_ptr<ByteStream> stream, const std::string& name) {
  std::string first(4, '\0');
  std::size_t have = 0;
  while (have < first.size()) {
    const std::size_t got = stream->read(first.data() + have, first.size() - have);
    if (got == 0) break;
    have += got;
  }
  first.resize(have);
  auto whole = std::make_unique<ResumedBytes>(first, std::move(stream));
  if (first.starts_with("\x1f\x8b")) return std::make_unique<GzipBytes>(std::move(whole), name);
  if (first == "\x28\xb5\x2f\xfd") return std::make_unique<ZstdBytes>(std::move(whole), name);
  return whole;
}

}  // namespace espalier
