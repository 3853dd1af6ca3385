#include "espalier/saved/sleeping_path.h"

#include <algorithm>

#include "espalier/base/error.h"
#include "espalier/saved/spill_buffers.h"

namespace espalier {

// Chunks that were not taken, after an error, are not wanted any more, and nobody writes to their entries.
SleepingPath::~SleepingPath() { queue_.forget(); }

int SleepingPath::add(const Member& member) {
  const Arena::Range range = member.range;
  const at::Tensor& rows_PW = member.rows_PW;
  const std::int64_t row_bytes =
      rows_PW.defined() ? rows_PW.size(1) * static_cast<std::int64_t>(rows_PW.itemsize()) : 0;
  Stored& stored = members_.emplace_back(Stored{range, row_bytes, {}});
  for (std::int64_t done = 0; done < range.bytes(); done += kSpillChunkBytes)
    stored.chunks.push_back({queue_.store_top() + done, 0, 0});
  queue_.set_store_top(queue_.store_top() + Store::aligned(range.bytes()));
  arena_.sleep(range);
  return static_cast<int>(members_.size()) - 1;
}

std::span<StoredChunk> SleepingPath::chunks_of(int number, std::int64_t rows) {
  Stored& member = members_.at(static_cast<std::size_t>(number));
  const std::int64_t bytes = rows * member.row_bytes;
  ESPALIER_INTERNAL(bytes <= member.range.bytes(), bytes, " bytes of ", member.range.bytes());
  return std::span(member.chunks).first(static_cast<std::size_t>((bytes + kSpillChunkBytes - 1) / kSpillChunkBytes));
}

void SleepingPath::ask(int member, std::int64_t rows) {
  for (const StoredChunk& chunk : chunks_of(member, rows)) queue_.ask(chunk);
  asked_.push_back(member);
}

void SleepingPath::bring_back(int number, std::int64_t rows) {
  if (asked_.empty()) ask(number, rows);
  ESPALIER_INTERNAL_EQ(asked_.front(), number, "another member was asked for");
  asked_.pop_front();
  Arena::Range range = members_[static_cast<std::size_t>(number)].range;
  arena_.wake(range);
  for (const StoredChunk& chunk : chunks_of(number, rows)) {
    std::byte* const room = queue_.take();
    arena_.copy_in(room, {range.begin, range.begin + chunk.bytes});
    queue_.give_back(room);
    range.begin += kSpillChunkBytes;
  }
}

void SleepingPath::put_away(int number, std::int64_t begin, std::int64_t end) {
  const Stored& member = members_.at(static_cast<std::size_t>(number));
  const Arena::Range range = member.range;
  const std::int64_t changed_from = begin * member.row_bytes, changed_to = end * member.row_bytes;
  std::int64_t from = 0;
  for (StoredChunk& chunk : chunks_of(number, end)) {
    const std::int64_t to = std::min(from + kSpillChunkBytes, changed_to);
    if (changed_from < to) {
      std::byte* const room = queue_.room();
      arena_.copy_out({range.begin + from, range.begin + to}, room);
      chunk.bytes = to - from;
      queue_.write(chunk, room);
    }
    from += kSpillChunkBytes;
  }
  arena_.sleep(range);
}

}  // namespace espalier
