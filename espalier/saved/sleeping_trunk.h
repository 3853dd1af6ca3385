// The saved layers of one open trunk while its waves run: in the store, and fetched ahead of its backward.
//
// A layer is copied out as soon as it is complete, while the next one computes; its pages go back to the machine. In
// the backward a layer is copied in before it is read, while the chunks of those below it are read ahead. The first of
// them are read while the last item below the trunk runs.
#pragma once

#include <vector>

#include "espalier/model/decoder_pass.h"
#include "espalier/saved/spill_queue.h"

namespace espalier {

class SleepingTrunk final : public Guest {
 public:
  // All must outlive the object; `saved` is that of the trunk's passes. Trunks open and close as a stack, here as in
  // the arena.
  SleepingTrunk(Arena& arena, SpillQueue& queue, const DecoderSaved& saved, std::int64_t first_layer);
  ~SleepingTrunk() override;

  // The backward is near: its layers are read ahead from now on, as far as there are buffers. Trunks are asked for in
  // the order in which they close.
  void ask_ahead();

  // In the backward a layer is in memory from one to the other; in the forward it sleeps from its end on. Errors of
  // both: those of Store.
  void enter(const Stop& stop) override;
  void leave(const Stop& stop) override;

 private:
  struct Layer {
    Arena::Range range;
    std::vector<StoredChunk> chunks;
  };

  void put_away(Arena::Range range);
  void bring_back(const Layer& layer);
  // Of the layers that are saved, the number of the one at the stop; -1: none of them.
  std::int64_t number_at(const Stop& stop) const;

  Arena& arena_;
  SpillQueue& queue_;
  const DecoderSaved& saved_;
  std::int64_t first_layer_;
  std::int64_t begin_;  // of the trunk in the store
  std::vector<Layer> layers_;
  bool asked_ = false;     // for all chunks, in the order of the backward
  std::int64_t away_ = 0;  // layers that were not brought back
};

}  // namespace espalier
