// The rotation of queries and keys by their positions.
#pragma once

#include <cstdint>
#include <vector>

namespace espalier {

// The rescaling of rotary frequencies ("rope_type"; equations in model/rotary.h).
enum class RopeType : std::uint8_t { llama3, linear, yarn, longrope, proportional };
struct RopeScaling {
  double factor = 1, low_freq_factor = 1, high_freq_factor = 4;
  std::int64_t original_max_position_embeddings = 8192;
  RopeType type = RopeType::llama3;
  double attention_factor = 1;                              // cos and sin are multiplied by it (yarn, longrope)
  double beta_fast = 32, beta_slow = 1;                     // yarn
  bool truncate = true;                                     // yarn: the ramp's ends are whole numbers
  std::vector<double> short_factor = {}, long_factor = {};  // longrope, one per frequency
  double turning = 1;  // proportional: the part of the frequencies, from the first one on, that are not 0

  // True if the rows of a longrope step rotate by long_factor. The step's longest rollout, of `longest` tokens, decides
  // for all rows.
  bool is_long(std::int64_t longest) const { return longest > original_max_position_embeddings; }
  bool operator==(const RopeScaling&) const = default;
};

struct Rope {
  double theta = 10000;
  bool has_scaling = false;
  RopeScaling scaling;

  bool operator==(const Rope&) const = default;
};

// A table of rotations: the channels of a head that rotate, 0 of them for none, and the growth of queries
// (AttentionShape).
struct RotaryShape {
  Rope rope;
  std::int64_t channels = 0;
  double growth = 0;
  std::int64_t growth_length = 0;

  bool operator==(const RotaryShape&) const = default;
};

}  // namespace espalier
