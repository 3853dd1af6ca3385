// Tensors of a path for layers that are not in use, in a store of its own: written back where it changed, read ahead of
// the layer's turn. Every range has its place there as long as the path lives.
#pragma once

#include <deque>
#include <span>
#include <vector>

#include "espalier/model/path_keeper.h"
#include "espalier/saved/spill_queue.h"

namespace espalier {

class SleepingPath : public PathKeeper {
 public:
  // Both must outlive the object. The queue keeps buffers for writing, for both ways are under way at once.
  SleepingPath(Arena& arena, SpillQueue& queue) : arena_(arena), queue_(queue) {}
  ~SleepingPath() override;

  bool one_place() const override { return false; }
  int add(const Member& member) override;
  // Errors of the three: those of Store.
  void ask(int member, std::int64_t rows) override;
  void bring_back(int member, std::int64_t rows) override;
  void put_away(int member, std::int64_t begin, std::int64_t end) override;

 private:
  struct Stored {
    Arena::Range range;
    std::int64_t row_bytes;
    std::vector<StoredChunk> chunks;
  };

  // The chunks that the first `rows` of a member begin in.
  std::span<StoredChunk> chunks_of(int member, std::int64_t rows);

  Arena& arena_;
  SpillQueue& queue_;
  std::vector<Stored> members_;
  std::deque<int> asked_;
};

}  // namespace espalier
