// Compares values that must be equal on every rank before they are used, because sums over ranks depend on them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "espalier/parallel/group.h"

namespace espalier {

// FNV-1a over words of 8 bytes, the last one filled up with zeros.
class Fingerprint {
 public:
  void add(std::string_view bytes) {
    for (; !bytes.empty(); bytes.remove_prefix(std::min(bytes.size(), sizeof(std::uint64_t)))) {
      std::uint64_t word = 0;
      std::memcpy(&word, bytes.data(), std::min(bytes.size(), sizeof word));
      hash_ = (hash_ ^ word) * 0x100000001b3u;
      hash_ ^= hash_ >> 32;  // a change in the highest bits must reach the lowest
    }
  }
  template <class Number>
  void add_number(const Number& number) {
    add({reinterpret_cast<const char*>(&number), sizeof number});
  }
  std::uint64_t value() const { return hash_; }

 private:
  std::uint64_t hash_ = 0xcbf29ce484222325u;
};

// Errors, on every rank: CommunicationError naming the ranks whose fingerprint is not that of the group's rank 0.
void require_same(Group& group, const std::string& what, std::uint64_t fingerprint, const std::string& remedy);
void require_same(Group& group, const std::string& what, std::string_view text, const std::string& remedy);

}  // namespace espalier
