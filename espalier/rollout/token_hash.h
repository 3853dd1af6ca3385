// A fast hash of token runs, to find candidates for equality. Its users compare the tokens themselves.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>

namespace espalier {

// Four independent multiply chains, eight tokens a round, so that memory and not the multiplier sets the pace.
inline std::uint64_t hash_of_tokens(std::span<const std::int32_t> tokens) {
  constexpr std::uint64_t kOdd[4] = {0x9e3779b97f4a7c15u, 0xc2b2ae3d27d4eb4fu, 0x165667b19e3779f9u,
                                     0xd6e8feb86659fd93u};
  std::uint64_t lane[4] = {tokens.size(), 1, 2, 3};
  std::size_t at = 0;
  for (; at + 8 <= tokens.size(); at += 8) {
    std::uint64_t words[4];
    std::memcpy(words, tokens.data() + at, sizeof words);
    for (int l = 0; l < 4; ++l) {
      lane[l] = (lane[l] ^ words[l]) * kOdd[l];
      lane[l] ^= lane[l] >> 29;
    }
  }
  for (; at < tokens.size(); ++at) lane[0] = (lane[0] ^ static_cast<std::uint32_t>(tokens[at])) * kOdd[1];
  std::uint64_t all = 0;
  for (int l = 0; l < 4; ++l) {
    all = (all ^ lane[l]) * kOdd[l];
    all ^= all >> 32;
  }
  return all;
}

}  // namespace espalier
