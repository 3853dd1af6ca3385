#include "tests/support/covering.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>

namespace espalier::testing {
namespace {

struct Pair {
  int f, a, g, b;  // f < g
};

constexpr int kUnset = -1, kDraws = 8;

class Array {
 public:
  Array(const Factors& factors, std::uint64_t seed)
      : factors_(factors), random_(seed), first_of_(factors.sizes.size() * factors.sizes.size()) {
    for (int g = 1; g < count(); ++g)
      for (int f = 0; f < g; ++f)
        for (int a = 0; a < factors.sizes[f]; ++a)
          for (int b = 0; b < factors.sizes[g]; ++b) {
            const Pair pair{f, a, g, b};
            if (a == 0 && b == 0) first_of_[f * count() + g] = static_cast<int>(pairs_.size());
            pairs_.push_back(pair);
            allowed_.push_back(may_meet(pair));
          }
    open_ = allowed_;
  }

  std::vector<std::vector<int>> rows() {
    std::vector<std::vector<int>> rows;
    for (std::size_t first = 0; first < pairs_.size(); ++first) {
      if (!open_[first]) continue;
      std::vector<int> best;
      int most = 0;
      for (int draw = 0; draw < kDraws; ++draw) {
        std::vector<int> row = drawn_row(pairs_[first]);
        const int closes = row.empty() ? 0 : count_open(row);
        if (closes > most) most = closes, best = std::move(row);
      }
      if (most == 0) {  // the draws ended where a factor has no value
        best = row_with(pairs_[first]);
        // Where nothing completes it, its values meet, but no row has both: a third factor has no value for them.
        if (!completes(best, 0)) continue;
      }
      for (int g = 1; g < count(); ++g)
        for (int f = 0; f < g; ++f) open_[place(f, best[f], g, best[g])] = false;
      rows.push_back(std::move(best));
    }
    return rows;
  }

 private:
  int count() const { return static_cast<int>(factors_.sizes.size()); }
  bool may_meet(const Pair& p) const { return !factors_.may_meet || factors_.may_meet(p.f, p.a, p.g, p.b); }

  int place(int f, int a, int g, int b) const {
    if (f > g) return place(g, b, f, a);
    return first_of_[f * count() + g] + a * factors_.sizes[g] + b;
  }

  std::vector<int> row_with(const Pair& pair) const {
    std::vector<int> row(factors_.sizes.size(), kUnset);
    row[pair.f] = pair.a, row[pair.g] = pair.b;
    return row;
  }

  // Begins with a pair, then gives one factor after another the value that closes most pairs with those before. Empty
  // where a factor has none.
  std::vector<int> drawn_row(const Pair& pair) {
    std::vector<int> row = row_with(pair), order(factors_.sizes.size());
    std::iota(order.begin(), order.end(), 0);
    std::ranges::shuffle(order, random_);
    for (const int f : order) {
      if (row[f] != kUnset) continue;
      std::vector<int> values(factors_.sizes[f]);
      std::iota(values.begin(), values.end(), 0);
      std::ranges::shuffle(values, random_);
      int most = kUnset;
      for (const int value : values)
        if (const int closes = closed_with(row, f, value); closes > most) most = closes, row[f] = value;
      if (row[f] == kUnset) return {};
    }
    return row;
  }

  // Gives the factors from f on that have no value any that fit; the row is whole where that is possible.
  bool completes(std::vector<int>& row, int f) const {
    if (f == count()) return true;
    if (row[f] != kUnset) return completes(row, f + 1);
    for (int value = 0; value < factors_.sizes[f]; ++value) {
      if (closed_with(row, f, value) == kUnset) continue;
      row[f] = value;
      if (completes(row, f + 1)) return true;
    }
    row[f] = kUnset;
    return false;
  }

  // The number of open pairs that the value closes with values of the row, kUnset where it may not stand there. The row
  // may have it.
  int closed_with(const std::vector<int>& row, int f, int value) const {
    int closes = 0;
    for (int g = 0; g < count(); ++g) {
      if (g == f || row[g] == kUnset) continue;
      const int pair = place(f, value, g, row[g]);
      if (!allowed_[pair]) return kUnset;
      closes += open_[pair] ? 1 : 0;
    }
    return closes;
  }

  int count_open(const std::vector<int>& row) const {
    int closes = 0;
    for (int g = 1; g < count(); ++g)
      for (int f = 0; f < g; ++f) closes += open_[place(f, row[f], g, row[g])] ? 1 : 0;
    return closes;
  }

  const Factors& factors_;
  std::mt19937_64 random_;
  std::vector<Pair> pairs_;
  std::vector<int> first_of_;  // of two factors f < g, by f * count() + g: the place of their first pair in pairs_
  std::vector<bool> allowed_, open_;  // whose values may meet; that stand in no row yet
};

}  // namespace

std::vector<std::vector<int>> covering_rows(const Factors& factors, std::uint64_t seed) {
  return Array(factors, seed).rows();
}

std::uint64_t seed_of_day() {
  static const std::uint64_t seed = [] {
    const char* const given = std::getenv("ESPALIER_DAY");
    int year = 0, month = 0, day = 0;
    std::chrono::sys_days date = std::chrono::floor<std::chrono::days>(std::chrono::system_clock::now());
    if (given != nullptr) {
      if (std::sscanf(given, "%d-%d-%d", &year, &month, &day) != 3)
        throw std::invalid_argument("ESPALIER_DAY: expected a date as 2026-11-28, got '" + std::string(given) + "'");
      date = std::chrono::year(year) / month / day;
    }
    const std::chrono::year_month_day parts(date);
    std::printf("[ day      ] ESPALIER_DAY=%04d-%02u-%02u\n", static_cast<int>(parts.year()),
                static_cast<unsigned>(parts.month()), static_cast<unsigned>(parts.day()));
    return static_cast<std::uint64_t>(date.time_since_epoch().count());
  }();
  return seed;
}

}  // namespace espalier::testing
