// Shared by the checkpoint tests: a directory that disappears, shapes of small models, and random bits.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/mixers/attention/shape.h"
#include "espalier/model/parameters.h"

namespace espalier::test {

class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string name = (std::filesystem::temp_directory_path() / "espalier-test-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary directory");
    path_ = std::filesystem::canonical(name);
  }
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

inline void write_text(const std::filesystem::path& path, const std::string& text) {
  std::filesystem::remove(path);  // some file systems wait for the disk when a file is truncated and rewritten
  std::ofstream(path, std::ios::binary) << text;
}

inline std::string read_text(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

inline std::size_t entries_in(const std::filesystem::path& directory) {
  return static_cast<std::size_t>(
      std::distance(std::filesystem::directory_iterator(directory), std::filesystem::directory_iterator()));
}

// A safetensors file by hand: the header's length, the header, the data.
inline std::string raw_safetensors(const std::string& header, const std::string& data) {
  const std::uint64_t length = header.size();
  std::string out(8, '\0');
  std::memcpy(out.data(), &length, 8);
  return out + header + data;
}

inline ModelShape llama_shape() {
  ModelShape shape;
  shape.architecture = "LlamaForCausalLM";
  shape.hidden = 8, shape.vocabulary = 11, shape.max_positions = 32;
  shape.layer = attention_layers(2, {.heads = 4, .kv_heads = 2, .head_dim = 2}, 12);
  return shape;
}

// Experts in the second layer only.
inline ModelShape moe_shape() {
  ModelShape shape = llama_shape();
  shape.architecture = "Qwen3MoeForCausalLM";
  shape.experts = 3, shape.experts_per_token = 2, shape.expert_inner = 4;
  shape.layer[1].mlp = MlpKind::experts;
  return shape;
}

// Every bit pattern may occur: NaN with payload, infinities, subnormals.
inline std::vector<std::byte> random_bytes(std::size_t count, std::uint64_t seed) {
  std::vector<std::byte> out(count);
  for (std::byte& value : out) {
    seed += 0x9e3779b97f4a7c15u;
    std::uint64_t z = (seed ^ (seed >> 30)) * 0xbf58476d1ce4e5b9u;
    value = static_cast<std::byte>((z ^ (z >> 27)) >> 56);
  }
  return out;
}

// Finite values with few bits, exact in every format.
inline std::vector<float> exact_values(std::int64_t count, std::uint64_t seed) {
  std::vector<float> out;
  for (const std::byte value : random_bytes(static_cast<std::size_t>(count), seed))
    out.push_back(static_cast<float>(static_cast<int>(value) - 128) / 64.0f);
  return out;
}

// The message of the InputError (or other Error) that `action` throws; fails the test when it throws nothing.
template <class Expected, class Action>
std::string message_of(Action&& action) {
  try {
    action();
  } catch (const Expected& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another exception: " << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

inline bool holds(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }
#define EXPECT_HOLDS(text, part) EXPECT_TRUE(::espalier::test::holds(text, part)) << "'" << part << "' in: " << text

}  // namespace espalier::test
