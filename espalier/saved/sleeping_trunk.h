// The saved layers of one open trunk: offloaded to the store while its waves run, and fetched ahead of its backward.
//
// A layer is copied out as soon as it is complete, while the next one computes; its pages go back to the system. In the
// backward a layer is copied in before it is read, while chunks of the layers below it are read ahead. The first chunks
// are read while the last item below the trunk runs.
#pragma once

#include <vector>

#include "espalier/model/decoder_pass.h"
#include "espalier/saved/spill_queue.h"

namespace espalier {

class SleepingTrunk final : public Guest {
 public:
  // All must outlive the object; `saved` is the one that the trunk's passes use. Trunks open and close as a stack, as
  // in the arena.
  SleepingTrunk(Arena& arena, SpillQueue& queue, const DecoderSaved& saved, std::int64_t first_layer);
  ~SleepingTrunk() override;

  // Announces that the backward is near: from now on its layers are read ahead as far as buffers allow. Trunks are
  // announced in the order in which they close.
  void ask_ahead();

  // In the backward a layer is in memory from enter to leave; in the forward it is offloaded at leave. Both throw the
  // errors of Store.
  void enter(const Stop& stop) override;
  void leave(const Stop& stop) override;

 private:
  struct Layer {
    Arena::Range range;
    std::vector<StoredChunk> chunks;
  };

  void put_away(Arena::Range range);
  void bring_back(const Layer& layer);
  // The index of the stop's layer among the saved layers; -1: the stop has none.
  std::int64_t number_at(const Stop& stop) const;

  Arena& arena_;
  SpillQueue& queue_;
  const DecoderSaved& saved_;
  std::int64_t first_layer_;
  std::int64_t begin_;  // the trunk's first byte in the store
  std::vector<Layer> layers_;
  bool asked_ = false;     // all chunks were requested, in the order of the backward
  std::int64_t away_ = 0;  // layers still in the store
};

}  // namespace espalier
