#include "espalier/saved/sleeping_trunk.h"

#include <algorithm>

#include "espalier/base/error.h"
#include "espalier/plan/memory_model.h"

namespace espalier {

SleepingTrunk::SleepingTrunk(Arena& arena, SpillQueue& queue)
    : arena_(arena), queue_(queue), begin_(queue.store_top()) {}

// Chunks that were not fetched, after an error, are not wanted any more, and nobody writes to their entries.
SleepingTrunk::~SleepingTrunk() {
  if (away_ > 0) queue_.forget();
  queue_.set_store_top(begin_);
}

void SleepingTrunk::put_away(std::int64_t layer, Arena::Range range) {
  ESPALIER_INTERNAL_EQ(layer, static_cast<std::int64_t>(layers_.size()));
  Layer& own = layers_.emplace_back(Layer{range, {}});
  ++away_;
  own.chunks.resize(static_cast<std::size_t>((range.bytes() + kSpillChunkBytes - 1) / kSpillChunkBytes));
  std::int64_t from = range.begin;
  for (StoredChunk& chunk : own.chunks) {
    chunk = {queue_.store_top(), std::min(kSpillChunkBytes, range.end - from), 0};
    std::byte* const room = queue_.room();
    arena_.copy_out({from, from + chunk.bytes}, room);
    queue_.write(chunk, room);
    queue_.set_store_top(chunk.offset + Store::aligned(chunk.bytes));
    from += chunk.bytes;
  }
  arena_.sleep(range);
}

void SleepingTrunk::ask_ahead() {
  if (asked_) return;
  for (auto own = layers_.rbegin(); own != layers_.rend(); ++own)
    for (const StoredChunk& chunk : own->chunks) queue_.ask(chunk);
  asked_ = true;
}

void SleepingTrunk::bring_back(std::int64_t layer) {
  ask_ahead();
  const Layer& own = layers_.at(static_cast<std::size_t>(layer));
  arena_.wake(own.range);
  std::int64_t to = own.range.begin;
  for (const StoredChunk& chunk : own.chunks) {
    std::byte* const room = queue_.take();
    arena_.copy_in(room, {to, to + chunk.bytes});
    queue_.give_back(room);
    to += chunk.bytes;
  }
  --away_;
}

void SleepingTrunk::let_go(std::int64_t layer) { arena_.sleep(layers_.at(static_cast<std::size_t>(layer)).range); }

}  // namespace espalier
