// Numbers, layouts and seeds of the tests that draw their cases.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/parallel/degrees.h"
#include "espalier/shape/local_shape.h"
#include "tests/support/covering.h"

namespace espalier::testing {

class Draws {
 public:
  explicit Draws(std::uint64_t seed) : random_(seed) {}
  std::int64_t below(std::int64_t n) { return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(n)); }
  template <class T>
  T one_of(std::initializer_list<T> choices) {
    return choices.begin()[below(static_cast<std::int64_t>(choices.size()))];
  }
  bool one_in(std::int64_t n) { return below(n) == 0; }

 private:
  std::mt19937_64 random_;
};

// Up to eight ranks; three layers, four query heads.
inline Degrees drawn_degrees(Draws& draws, const ModelShape& shape) {
  for (;;) {
    Degrees d{.tp = draws.one_of<std::int64_t>({1, 1, 2, 4}),
              .cp = draws.one_of<std::int64_t>({1, 1, 2, 3, 4}),
              .pp = draws.one_of<std::int64_t>({1, 1, 2, 3}),
              .dp = draws.one_of<std::int64_t>({1, 1, 2, 3, 4}),
              .ep = 1};
    if (d.ranks() == 1 || d.ranks() > 8) continue;
    d.full = d.dp * d.cp > 1 && draws.one_in(4);
    if (shape.experts > 0) d.ep = draws.one_of<std::int64_t>({1, 2, 4, 8});
    const bool spreads = d.ranks() / d.pp % d.ep == 0 && d.ep % d.tp == 0 && shape.experts % d.ep == 0;
    if (d.ep > 1 && !spreads) continue;
    try {
      const LocalShape divides(shape, d, {});
      return d;
    } catch (const OptionError&) {  // heads that tp does not divide
    }
  }
}

// `count` seeds that are others each day, of a year; or what ESPALIER_GENERATED_LAYOUTS=FIRST:COUNT says.
inline std::vector<std::uint64_t> drawn_seeds(unsigned long long count) {
  constexpr std::uint64_t kDays = 365;
  unsigned long long first = 1 + count * (seed_of_day() % kDays);
  const char* const given = std::getenv("ESPALIER_GENERATED_LAYOUTS");
  if (given != nullptr && std::sscanf(given, "%llu:%llu", &first, &count) != 2)
    throw std::runtime_error("ESPALIER_GENERATED_LAYOUTS: expected FIRST:COUNT");
  std::vector<std::uint64_t> seeds(count);
  std::iota(seeds.begin(), seeds.end(), first);
  return seeds;
}

}  // namespace espalier::testing
