// The saved layers of one open trunk while its waves run: in the store, and fetched ahead of its backward.
//
// A layer is copied out as soon as it is complete, while the next one computes; its pages go back to the machine. In
// the backward a layer is copied in before it is read, while the chunks of those below it are read ahead. The first of
// them are read while the last item below the trunk runs.
#pragma once

#include <vector>

#include "espalier/model/layer_keeper.h"
#include "espalier/saved/spill_queue.h"

namespace espalier {

class SleepingTrunk : public LayerKeeper {
 public:
  // Both must outlive the object. Trunks open and close as a stack, here as in the arena.
  SleepingTrunk(Arena& arena, SpillQueue& queue);
  ~SleepingTrunk() override;

  // The backward is near: its layers are read ahead from now on, as far as there are buffers. Trunks are asked for in
  // the order in which they close.
  void ask_ahead();

  // Errors of all three: those of Store.
  void put_away(std::int64_t layer, Arena::Range range) override;
  void bring_back(std::int64_t layer) override;
  void let_go(std::int64_t layer) override;

 private:
  struct Layer {
    Arena::Range range;
    std::vector<StoredChunk> chunks;
  };

  Arena& arena_;
  SpillQueue& queue_;
  std::int64_t begin_;  // of the trunk in the store
  std::vector<Layer> layers_;
  bool asked_ = false;     // for all chunks, in the order of the backward
  std::int64_t away_ = 0;  // layers that were not brought back
};

}  // namespace espalier
