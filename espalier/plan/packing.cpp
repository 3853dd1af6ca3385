// First fit by a tree of maxima: leaf i holds the room left in bin i, an inner node the largest below it.
#include "espalier/plan/packing.h"

#include <algorithm>
#include <bit>
#include <numeric>

namespace espalier {
namespace {

class FirstFit {
 public:
  FirstFit(std::size_t bins, std::int64_t capacity) : width_(std::bit_ceil(std::max<std::size_t>(bins, 1))) {
    room_.assign(2 * width_, capacity);
    std::fill(room_.begin() + static_cast<std::ptrdiff_t>(width_ + bins), room_.end(), 0);
    for (std::size_t node = width_ - 1; node >= 1; --node) room_[node] = std::max(room_[2 * node], room_[2 * node + 1]);
  }

  bool has_room(std::int64_t rows) const { return room_[1] >= rows; }

  // Takes `rows` from the first bin that has the room.
  std::size_t place(std::int64_t rows) {
    std::size_t node = 1;
    while (node < width_) node = room_[2 * node] >= rows ? 2 * node : 2 * node + 1;
    const std::size_t bin = node - width_;
    room_[node] -= rows;
    for (node /= 2; node >= 1; node /= 2) room_[node] = std::max(room_[2 * node], room_[2 * node + 1]);
    return bin;
  }

 private:
  std::size_t width_;
  std::vector<std::int64_t> room_;
};

// Bin of each block; blocks in `order`, largest first. Returns how many bins were used, 0 where `most` are too few.
std::size_t fill(std::span<const std::int64_t> rows, const std::vector<std::int32_t>& order, std::int64_t capacity,
                 std::size_t most, std::vector<std::int32_t>& bin_of) {
  FirstFit bins(most, capacity);
  std::size_t used = 0;
  for (std::int32_t block : order) {
    const std::int64_t taken = std::min(rows[block], capacity);
    if (!bins.has_room(taken)) return 0;
    const std::size_t bin = bins.place(taken);
    bin_of[block] = static_cast<std::int32_t>(bin);
    used = std::max(used, bin + 1);
  }
  return used;
}

}  // namespace

std::vector<std::vector<std::int32_t>> pack_blocks(std::span<const std::int64_t> rows, std::int64_t capacity,
                                                   std::int64_t ranks) {
  if (rows.empty()) return {};
  std::vector<std::int32_t> order(rows.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) { return rows[a] > rows[b]; });

  std::vector<std::int32_t> bin_of(rows.size()), even(rows.size());
  std::size_t used = fill(rows, order, capacity, rows.size(), bin_of);
  std::int64_t total = 0;
  for (std::int64_t block : rows) total += std::min(block, capacity);
  const std::int64_t largest = std::min(rows[order.front()], capacity);
  const std::int64_t wanted =
      std::min(static_cast<std::int64_t>(rows.size()), (static_cast<std::int64_t>(used) + ranks - 1) / ranks * ranks);
  const std::int64_t least = std::max(largest, (total + wanted - 1) / wanted);
  for (const std::int64_t smaller : {least, least + (capacity - least) / 8, least + (capacity - least) / 2}) {
    if (smaller >= capacity) continue;
    const std::size_t filled = fill(rows, order, smaller, static_cast<std::size_t>(wanted), even);
    if (filled == 0) continue;
    bin_of.swap(even);
    used = filled;
    break;
  }

  // Bins in the order of their first blocks.
  std::vector<std::vector<std::int32_t>> bins;
  bins.reserve(used);
  std::vector<std::int32_t> place(used, -1);
  for (std::size_t block = 0; block < rows.size(); ++block) {
    std::int32_t& at = place[bin_of[block]];
    if (at < 0) at = static_cast<std::int32_t>(bins.size()), bins.emplace_back();
    bins[at].push_back(static_cast<std::int32_t>(block));
  }
  return bins;
}

}  // namespace espalier
