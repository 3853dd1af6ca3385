// Copies of tiles and of bytes, sums that are added to global memory in bulk, and matrices that threads store.
#include "tests/cuda/accesses.h"
#include "tests/cuda/hopper/warpgroups.h"

namespace espalier::emulation {
namespace {

constexpr int kBoxColumns = 64, kBoxRowBytes = 128;

// The numbers by which blocks take turns, and what their writers know.
std::map<const int*, Knowledge>& numbers_told() {
  static auto* const all = new std::map<const int*, Knowledge>;
  return *all;
}

// The sums that were added last from a place of global memory on: by whom, and whether their thread has waited for
// them.
struct LastSums {
  unsigned actor = kNobody;
  std::uint32_t moment = 0;  // of the wait
  int group = 0;
  bool done = false;
};
std::map<const float*, LastSums>& last_sums() {
  static auto* const all = new std::map<const float*, LastSums>;
  return *all;
}

void start_copy(void* to, const TensorMap& map, const void* from, std::size_t bytes, void* barrier_at, int column,
                int row, Site site) {
  Warpgroups& block = warpgroups_now();
  CountedBarrier& barrier = block.counted_at(barrier_at, site);
  const Knowledge& knows = block.me().knows;
  if (!barrier.known_to_copies) fail("a barrier whose init the copy engine does not know of", site);
  std::string problem;
  const bool inside = block.for_places(to, bytes, [&](Place& place) {
    ++place.arriving;
    if (!problem.empty()) return;
    if (place.of_barrier)
      problem = "a copy to where a barrier is";
    else if (place.arriving > 1)
      problem = "a copy to where another one is in flight";
    else if (place.in_use > 0)
      problem = "a copy to what a product or a sum in flight reads";
    else if (place.writer != kNobody && !knows.knows(place.writer, place.written))
      problem = "a copy over what " + block.name_of_actor(place.writer) + " wrote, and nothing orders the two: a race";
    else if (place.writer != kNobody && !block.fenced(knows, place.writer, place.written))
      problem = "a copy over what " + block.name_of_actor(place.writer) + " wrote without a fence for copies";
    else if (const std::string other = block.unknown_reader(knows, place); !other.empty())
      problem = "a copy over what " + other + " read, and nothing orders the two: a race";
  });
  if (!inside) problem = "a copy to outside of shared memory";
  if (!problem.empty()) fail(problem + " (" + block.name_of_place(to) + ")", site);
  std::memset(to, 0xff, bytes);
  block.copies.push_back({static_cast<std::byte*>(to), map, from, bytes, &barrier, column, row, site});
}

}  // namespace

std::string encode_tensor_map(TensorMap& map, const void* data, std::int64_t rows, std::int64_t columns,
                              std::int64_t row_bytes, int box_rows) {
  if (reinterpret_cast<std::uintptr_t>(data) % 16 != 0) return "an address that is no multiple of 16";
  if (row_bytes % 16 != 0 || row_bytes <= 0 || row_bytes >= std::int64_t{1} << 40) return "a stride of rows";
  if (rows < 1 || columns < 1 || rows > std::int64_t{1} << 31 || columns > std::int64_t{1} << 31) return "a size";
  if (box_rows < 1 || box_rows > 256) return "a box of more than 256 rows, or of none";
  map = {static_cast<const std::uint16_t*>(data), row_bytes, static_cast<int>(rows), static_cast<int>(columns),
         box_rows};
  return "";
}

std::uint64_t shared_address(const void* place) {
  return static_cast<std::uint64_t>(static_cast<const std::byte*>(place) - warpgroups_now().seat.shared);
}

void tensor_load(void* to, const TensorMap& map, void* barrier, int column, int row, Site site) {
  if (map.data == nullptr) fail("a matrix that the copy engine was not told of", site);
  if (shared_address(to) % 1024 != 0) fail("a swizzled tile at a place that is no multiple of 1024", site);
  for (int r = std::max(row, 0); r < std::min(row + map.box_rows, map.rows); ++r) {
    const int first = std::max(column, 0), count = std::min(column + kBoxColumns, map.columns) - first;
    const auto* const from = reinterpret_cast<const std::byte*>(map.data) + r * map.row_bytes + first * 2;
    if (count > 0) access(from, static_cast<std::size_t>(count) * 2, false, __builtin_return_address(0));
  }
  start_copy(to, map, nullptr, static_cast<std::size_t>(map.box_rows) * kBoxRowBytes, barrier, column, row, site);
}
void bulk_load(void* to, const void* from, int bytes, void* barrier, Site site) {
  if (bytes % 16 != 0 || bytes <= 0) fail("a copy of bytes that are no multiple of 16", site);
  expect_aligned(to, 16, site);
  expect_aligned(from, 16, site);
  access(from, static_cast<std::size_t>(bytes), false, __builtin_return_address(0));
  start_copy(to, {}, from, static_cast<std::size_t>(bytes), barrier, 0, 0, site);
}

void Warpgroups::finish_copy(std::size_t index) {
  const TileCopy copy = copies[index];
  copies.erase(copies.begin() + static_cast<std::ptrdiff_t>(index));
  CountedBarrier& barrier = *copy.barrier;
  const auto moment = static_cast<std::uint32_t>(barrier.phase + 1);
  (void)for_places(copy.to, copy.bytes, [&](Place& place) {
    --place.arriving;
    place.writer = barrier.actor, place.written = moment;
    place.forget_reads();
  });
  if (copy.from != nullptr) std::memcpy(copy.to, copy.from, copy.bytes);
  const auto base_of_tile = static_cast<std::uintptr_t>(copy.to - seat.shared);
  for (int r = 0; copy.from == nullptr && r < copy.map.box_rows; ++r)
    for (int c = 0; c < kBoxColumns; ++c) {
      const int row = copy.row + r, column = copy.column + c;
      const bool inside = row >= 0 && row < copy.map.rows && column >= 0 && column < copy.map.columns;
      std::uint16_t x = 0;
      if (inside)
        std::memcpy(&x, reinterpret_cast<const std::byte*>(copy.map.data) + row * copy.map.row_bytes + column * 2, 2);
      const auto offset = static_cast<std::uintptr_t>(r) * kBoxRowBytes + static_cast<std::uintptr_t>(c) * 2;
      std::memcpy(seat.shared + swizzled(base_of_tile + offset), &x, 2);
    }
  Knowledge done;
  done.until.assign(threads[0].knows.until.size(), 0), done.fenced = done.until;
  done.until[barrier.actor] = moment;
  barrier.arriving.join(done);
  barrier.bytes -= static_cast<std::int64_t>(copy.bytes);
  end_phase_if_complete(barrier);
  count("copies of tiles", 1);
}

void bulk_add(float* to, const void* from, int bytes, Site site) {
  Warpgroups& block = warpgroups_now();
  const Knowledge& knows = block.me().knows;
  if (bytes % 16 != 0 || bytes <= 0) fail("sums of bytes that are no multiple of 16", site);
  expect_aligned(to, 16, site);
  expect_aligned(from, 16, site);
  access(to, static_cast<std::size_t>(bytes), false, __builtin_return_address(0));  // sums do not race with each other
  std::string problem;
  const bool inside = block.for_places(from, static_cast<std::size_t>(bytes), [&](Place& place) {
    ++place.in_use;
    if (!problem.empty()) return;
    if (place.writer == kNobody)
      problem = "sums of what nobody wrote";
    else if (!knows.knows(place.writer, place.written))
      problem = "sums of what " + block.name_of_actor(place.writer) + " wrote, and nothing orders the two: a race";
    else if (!block.fenced(knows, place.writer, place.written))
      problem = "sums of what " + block.name_of_actor(place.writer) + " wrote without a fence for copies";
  });
  if (!inside) problem = "sums from outside of shared memory";
  LastSums& last = last_sums()[to];
  if (last.actor != kNobody && last.actor != block.actor_now() && !(last.done && knows.knows(last.actor, last.moment)))
    problem = "sums to where " + block.name_of_actor(last.actor) + " adds, and nothing orders the two";
  last = {block.actor_now(), 0, block.me().sum_groups, false};
  if (!problem.empty()) fail(problem, site);
  block.adding.push_back(
      {to, static_cast<const float*>(from), static_cast<std::size_t>(bytes), thread_now(), block.me().sum_groups, {}});
}
void bulk_commit() { ++warpgroups_now().me().sum_groups; }
void bulk_wait(int groups_left, bool until_read, Site site) {
  Warpgroups& block = warpgroups_now();
  const unsigned thread = thread_now();
  const int last = block.me().sum_groups - groups_left;
  const auto done = [&] {
    return std::none_of(block.adding.begin(), block.adding.end(), [&](const Adding& each) {
      return each.thread == thread && each.group < last && (!until_read || each.read.empty());
    });
  };
  wait_until(done, "sums in flight", site);
  if (until_read) return;
  for (auto& [to, sums] : last_sums())
    if (sums.actor == block.actor_now() && !sums.done && sums.group < last)
      sums.done = true, sums.moment = block.me().knows.until[block.actor_now()];
}
void Warpgroups::finish_adding(std::size_t index) {
  Adding& each = adding[index];
  if (each.read.empty()) {
    (void)for_places(each.from, each.bytes, [&](Place& place) { --place.in_use; });
    each.read.assign(each.from, each.from + each.bytes / 4);
    return;
  }
  for (std::size_t i = 0; i < each.bytes / 4; ++i) each.to[i] += each.read[i];
  adding.erase(adding.begin() + static_cast<std::ptrdiff_t>(index));
  count("sums in bulk", 1);
}

void forget_turns() {
  numbers_told().clear();
  last_sums().clear();
}
void wait_for_number(const int* at, int value, Site site) {
  wait_until([&] { return *at == value; }, "turn " + std::to_string(value), site);
  const Knowledge& told = numbers_told()[at];
  Knowledge& knows = warpgroups_now().me().knows;
  if (told.until.size() == knows.until.size()) knows.join(told);
}
void add_to_number(int* at, int value, Site) {
  Warpgroups& block = warpgroups_now();
  Knowledge& told = numbers_told()[at];
  if (told.until.size() != block.me().knows.until.size()) told = Knowledge();
  block.tell(told);
  *at += value;
}

void store_matrices(void* row, const unsigned (&r)[4], bool transposed, Site site) {
  struct Mine {
    unsigned r[4];
    std::byte* row;
  } const mine{{r[0], r[1], r[2], r[3]}, static_cast<std::byte*>(row)};
  expect_aligned(row, 16, site);
  Warpgroups& block = warpgroups_now();
  const unsigned first_thread = thread_now() / 32 * 32;
  exchange_and("stmatrix", &mine, sizeof(mine), site, [&](const Exchange& all) {
    for (unsigned m = 0; m < 4; ++m) {
      unsigned banks = 0;
      for (unsigned i = 0; i < 8; ++i) {
        const unsigned lane = m * 8 + i;
        std::byte* const to = lane_value<Mine>(all, lane, site).row;
        std::uint16_t values[8];
        for (unsigned j = 0; j < 8; ++j) {
          const unsigned a = transposed ? j : i, b = transposed ? i : j;  // element (a, b) of what the lanes hold
          const unsigned two = lane_value<Mine>(all, a * 4 + b / 2, site).r[m];
          values[j] = static_cast<std::uint16_t>(b % 2 == 0 ? two : two >> 16);
        }
        const auto problem = block.problem_of_access(first_thread + lane, to, 16, true);
        if (problem) fail("a matrix stored " + *problem + " (" + block.name_of_place(to) + ")", site);
        std::memcpy(to, values, 16);
        banks |= 1u << reinterpret_cast<std::uintptr_t>(to) / 16 % 8;
      }
      count("bank conflicts", 8 - std::popcount(banks));
    }
  });
}

}  // namespace espalier::emulation
