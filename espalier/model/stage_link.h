// The link of a stage of pp to its neighbours: a forward sends rows to the next stage, a backward gradients to the
// previous one.
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/model/decoder.h"
#include "espalier/model/guest.h"

namespace espalier {

class StageLink final : public Guest {
 public:
  // `stream_TM`: the input of the pass's next stop, in a backward a gradient. Both must outlive the object.
  StageLink(const Decoder& decoder, const at::Tensor& stream_TM) : decoder_(decoder), stream_TM_(stream_TM) {}

  // Before this rank's first layer of a pass, receives the stream from the neighbour that ran before; after its last
  // layer, sends the stream on. A backward sends nothing if nothing before this stage trains.
  void enter(const Stop& stop) override;
  void leave(const Stop& stop) override;

 private:
  const Decoder& decoder_;
  const at::Tensor& stream_TM_;
};

}  // namespace espalier
