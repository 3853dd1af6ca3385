#include "espalier/hosting/base_identity.h"

#include <zlib.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <fstream>
#include <system_error>
#include <vector>

#include "espalier/shape/fingerprint.h"

namespace espalier {

namespace fs = std::filesystem;

namespace {

constexpr std::int64_t kSamples = 32, kSampleBytes = 4096;  // of a file

std::vector<fs::path> weight_files(const fs::path& folder) {
  std::vector<fs::path> out;
  std::error_code ignored;
  for (fs::directory_iterator at(folder, ignored), end; at != end; at.increment(ignored))
    if (at->path().extension() == ".safetensors" && at->is_regular_file(ignored)) out.push_back(at->path());
  std::ranges::sort(out);
  return out;
}

}  // namespace

std::string identity_of(const ModelShape& shape, const fs::path& folder) {
  std::uint32_t sum = 0;
  const auto add = [&](const char* data, std::size_t bytes) {
    if (bytes > 0) sum = static_cast<std::uint32_t>(crc32_z(sum, reinterpret_cast<const Bytef*>(data), bytes));
  };
  const std::string words = fingerprint_of(shape);
  add(words.data(), words.size());
  std::int64_t all_bytes = 0;
  for (const fs::path& file : weight_files(folder)) {
    std::error_code ignored;
    const auto bytes = static_cast<std::int64_t>(fs::file_size(file, ignored));
    all_bytes += bytes;
    std::ifstream in(file, std::ios::binary);
    std::array<char, kSampleBytes> sample{};
    for (std::int64_t i = 0; i < kSamples && in; ++i) {
      in.seekg(std::max<std::int64_t>(0, bytes - kSampleBytes) * i / (kSamples - 1));
      in.read(sample.data(), kSampleBytes);
      add(sample.data(), static_cast<std::size_t>(in.gcount()));
      in.clear();
    }
  }
  char text[48];
  std::snprintf(text, sizeof text, "%08x-%lld", sum, static_cast<long long>(all_bytes));
  return text;
}

}  // namespace espalier
