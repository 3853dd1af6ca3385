// Covering arrays: few rows of values in which every two values of different factors stand together at least once.
// A product of five factors of ten values has 100,000 rows, such an array somewhat more than 100. Most faults show with
// two values (Kuhn, Kacker, Lei: Practical combinatorial testing, NIST SP 800-142).
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace espalier::testing {

struct Factors {
  std::vector<int> sizes;  // factor f has the values 0 to sizes[f] - 1
  // True if value a of factor f and value b of factor g > f may stand in one row; empty: always.
  std::function<bool(int f, int a, int g, int b)> may_meet = {};
};

// A row has a value of every factor. Other seeds give other rows. Errors: std::invalid_argument where a value meets
// none of another factor.
std::vector<std::vector<int>> covering_rows(const Factors& factors, std::uint64_t seed);

// The same all day, another one tomorrow. ESPALIER_DAY=2026-11-28 in place of today; printed once.
std::uint64_t seed_of_day();

}  // namespace espalier::testing
