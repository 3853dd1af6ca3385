#include "espalier/saved/sleeping_trunk.h"

#include <algorithm>

#include "espalier/base/error.h"
#include "espalier/saved/spill_buffers.h"

namespace espalier {

SleepingTrunk::SleepingTrunk(Arena& arena, SpillQueue& queue, const DecoderSaved& saved, std::int64_t first_layer)
    : arena_(arena), queue_(queue), saved_(saved), first_layer_(first_layer), begin_(queue.store_top()) {}

// Chunks that were not fetched, after an error, are not wanted any more, and nobody writes to their entries.
SleepingTrunk::~SleepingTrunk() {
  if (away_ > 0) queue_.forget();
  queue_.set_store_top(begin_);
}

std::int64_t SleepingTrunk::number_at(const Stop& stop) const {
  return stop.is_layer() ? std::max<std::int64_t>(-1, stop.unit - first_layer_) : -1;
}

void SleepingTrunk::enter(const Stop& stop) {
  const std::int64_t number = number_at(stop);
  if (number >= 0 && stop.pass == Pass::backward) bring_back(layers_.at(static_cast<std::size_t>(number)));
}

void SleepingTrunk::leave(const Stop& stop) {
  const std::int64_t number = number_at(stop);
  if (number < 0) return;
  if (stop.pass == Pass::forward) return put_away(saved_.offload.at(static_cast<std::size_t>(number)));
  arena_.sleep(layers_.at(static_cast<std::size_t>(number)).range);  // nobody reads it again
}

void SleepingTrunk::put_away(Arena::Range range) {
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

void SleepingTrunk::bring_back(const Layer& own) {
  ask_ahead();
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

}  // namespace espalier
