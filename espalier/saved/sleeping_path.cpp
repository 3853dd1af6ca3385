#include "espalier/saved/sleeping_path.h"

#include <algorithm>

#include "espalier/base/error.h"
#include "espalier/plan/memory_model.h"

namespace espalier {

// Chunks that were not taken, after an error, are not wanted any more, and nobody writes to their entries.
SleepingPath::~SleepingPath() { queue_.forget(); }

int SleepingPath::add(Arena::Range range) {
  Member& member = members_.emplace_back(Member{range, {}});
  for (std::int64_t done = 0; done < range.bytes(); done += kSpillChunkBytes)
    member.chunks.push_back({queue_.store_top() + done, 0, 0});
  queue_.set_store_top(queue_.store_top() + Store::aligned(range.bytes()));
  arena_.sleep(range);
  return static_cast<int>(members_.size()) - 1;
}

std::span<StoredChunk> SleepingPath::chunks_of(int number, std::int64_t bytes) {
  Member& member = members_.at(static_cast<std::size_t>(number));
  ESPALIER_INTERNAL(bytes <= member.range.bytes(), bytes, " bytes of ", member.range.bytes());
  return std::span(member.chunks).first(static_cast<std::size_t>((bytes + kSpillChunkBytes - 1) / kSpillChunkBytes));
}

void SleepingPath::ask(int member, std::int64_t bytes) {
  for (const StoredChunk& chunk : chunks_of(member, bytes)) queue_.ask(chunk);
  asked_.push_back(member);
}

void SleepingPath::bring_back(int number, std::int64_t bytes) {
  if (asked_.empty()) ask(number, bytes);
  ESPALIER_INTERNAL_EQ(asked_.front(), number, "another member was asked for");
  asked_.pop_front();
  Arena::Range range = members_[static_cast<std::size_t>(number)].range;
  arena_.wake(range);
  for (const StoredChunk& chunk : chunks_of(number, bytes)) {
    std::byte* const room = queue_.take();
    arena_.copy_in(room, {range.begin, range.begin + chunk.bytes});
    queue_.give_back(room);
    range.begin += kSpillChunkBytes;
  }
}

void SleepingPath::put_away(int number, std::int64_t begin, std::int64_t end) {
  const Arena::Range range = members_.at(static_cast<std::size_t>(number)).range;
  std::int64_t from = 0;
  for (StoredChunk& chunk : chunks_of(number, end)) {
    const std::int64_t to = std::min(from + kSpillChunkBytes, end);
    if (begin < to) {
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
