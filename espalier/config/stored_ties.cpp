#include "espalier/config/stored_ties.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <string_view>
#include <vector>

#include "espalier/base/float16.h"
#include "espalier/config/stored_headers.h"

namespace espalier {
namespace fs = std::filesystem;
namespace {

template <class T>
T number_at(const char* bytes) {
  T out;
  std::memcpy(&out, bytes, sizeof out);
  return out;
}

std::size_t bytes_of(std::string_view dtype) {
  if (dtype == "F64") return 8;
  if (dtype == "F32") return 4;
  return dtype == "F16" || dtype == "BF16" ? 2 : 0;
}

double value_at(std::string_view dtype, const char* bytes) {
  if (dtype == "F64") return number_at<double>(bytes);
  if (dtype == "F32") return static_cast<double>(number_at<float>(bytes));
  const auto bits = number_at<std::uint16_t>(bytes);
  if (dtype == "BF16") return static_cast<double>(std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16));
  float16 half;
  half.bits = bits;
  return static_cast<double>(half);
}

// Reads the values of a matrix in pieces.
class Values {
 public:
  explicit Values(const StoredMatrix& matrix)
      : file_(matrix.file, std::ios::binary), each_(bytes_of(matrix.dtype)), dtype_(matrix.dtype) {
    file_.seekg(static_cast<std::streamoff>(matrix.begin));
  }
  bool read(std::size_t count) {
    bytes_.resize(count * each_);
    return static_cast<bool>(file_.read(bytes_.data(), static_cast<std::streamsize>(bytes_.size())));
  }
  const std::vector<char>& bytes() const { return bytes_; }
  double operator[](std::size_t i) const { return value_at(dtype_, bytes_.data() + i * each_); }

 private:
  std::ifstream file_;
  std::size_t each_;
  std::string_view dtype_;
  std::vector<char> bytes_;
};

bool differ(const StoredMatrix& a, const StoredMatrix& b) {
  constexpr std::size_t kPiece = std::size_t{1} << 20;
  if (a.shape != b.shape || a.shape[0] <= 0 || a.shape[1] <= 0) return false;
  const std::size_t count = static_cast<std::size_t>(a.shape[0]) * static_cast<std::size_t>(a.shape[1]);
  for (const StoredMatrix* one : {&a, &b})
    if (bytes_of(one->dtype) == 0 || one->end - one->begin != count * bytes_of(one->dtype)) return false;
  Values left(a), right(b);
  for (std::size_t done = 0; done < count; done += kPiece) {
    const std::size_t size = std::min(kPiece, count - done);
    if (!left.read(size) || !right.read(size)) return false;
    if (a.dtype == b.dtype && left.bytes() == right.bytes()) continue;
    for (std::size_t i = 0; i < size; ++i)
      if (left[i] != right[i]) return true;
  }
  return false;
}

}  // namespace

void untie_differing_head(const fs::path& directory, Json& config) {
  if (!config.is_object()) return;
  const auto tied = config.find("tie_word_embeddings");
  if (tied != config.end() && *tied == false) return;
  StoredHeaders headers(directory);
  const auto head = headers.matrix([](std::string_view name) { return name.ends_with("lm_head.weight"); });
  if (!head) return;
  // Layers that predict further tokens may have embeddings of their own.
  const auto embedding = headers.matrix([](std::string_view name) {
    return (name.ends_with("embed_tokens.weight") || name == "backbone.embeddings.weight") &&
           name.find("layers.") == name.npos;
  });
  if (embedding && differ(*embedding, *head)) config["tie_word_embeddings"] = false;
}

}  // namespace espalier
