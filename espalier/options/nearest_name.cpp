#include "espalier/options/nearest_name.h"

#include <algorithm>

namespace espalier {
namespace {

// Edit distance with swaps of neighbours, by rows of the usual table: d(i, j) over prefixes of lengths i and j.
std::size_t edits_between(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before_last, last(b.size() + 1), row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) last[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        row[j] = std::min(row[j], before_last[j - 2] + 1);
    }
    before_last = last;
    last = row;
  }
  return last[b.size()];
}

}  // namespace

std::string nearest_name(std::string_view name, const std::vector<std::string>& candidates) {
  constexpr std::size_t kLongestName = 200;  // the table is quadratic, and nobody mistypes an essay
  if (name.size() > kLongestName) return "";
  std::size_t fewest = std::max<std::size_t>(2, name.size() / 3) + 1;
  std::string nearest;
  for (const std::string& candidate : candidates) {
    // A candidate with nothing in common is no help: "-n" is one edit from any one-letter name.
    const std::size_t edits = edits_between(name, candidate);
    if (edits < fewest && edits < std::max(name.size(), candidate.size())) {
      fewest = edits;
      nearest = candidate;
    }
  }
  return nearest;
}

}  // namespace espalier
