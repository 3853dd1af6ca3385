// Offloads the path's tensors of layers that are not in use to a store of their own: changed rows are written back, and
// a layer is read ahead of its turn. Every range keeps its place in the store as long as the path exists.
#pragma once

#include <deque>
#include <span>
#include <vector>

#include "espalier/model/path_keeper.h"
#include "espalier/saved/spill_queue.h"

namespace espalier {

class SleepingPath : public PathKeeper {
 public:
  // Both must outlive the object. The queue must keep buffers free for writing, because reads and writes overlap.
  SleepingPath(Arena& arena, SpillQueue& queue) : arena_(arena), queue_(queue) {}
  ~SleepingPath() override;

  bool one_place() const override { return false; }
  int add(const Member& member) override;
  // The three functions throw the errors of Store.
  void ask(int member, std::int64_t rows) override;
  void bring_back(int member, std::int64_t rows) override;
  void put_away(int member, std::int64_t begin, std::int64_t end) override;

 private:
  struct Stored {
    Arena::Range range;
    std::int64_t row_bytes;
    std::vector<StoredChunk> chunks;
  };

  // The chunks in which the first `rows` of a member begin.
  std::span<StoredChunk> chunks_of(int member, std::int64_t rows);

  Arena& arena_;
  SpillQueue& queue_;
  std::vector<Stored> members_;
  std::deque<int> asked_;
};

}  // namespace espalier
