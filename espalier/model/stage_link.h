// The links between stages of pp: they send rows to the next stage, and gradients back.
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/model/decoder.h"
#include "espalier/model/guest.h"

namespace espalier {

class StageLink final : public Guest {
 public:
  // `stream_TM`: the pass's input of its next stop. Both must outlive the object.
  StageLink(const Decoder& decoder, const at::Tensor& stream_TM) : decoder_(decoder), stream_TM_(stream_TM) {}

  // At this rank's first layer of a pass overwrites the stream with the previous stage's; after the last layer sends it
  // on.
  void enter(const Stop& stop) override;
  void leave(const Stop& stop) override;

 private:
  const Decoder& decoder_;
  const at::Tensor& stream_TM_;
};

}  // namespace espalier
