// The links between stages of pp: the rows between two of them, and the gradients of these.
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/model/decoder.h"
#include "espalier/model/guest.h"

namespace espalier {

class StageLink final : public Guest {
 public:
  // `stream_TM`: of the pass, what goes into its next stop. Both must outlive the object.
  StageLink(const Decoder& decoder, const at::Tensor& stream_TM) : decoder_(decoder), stream_TM_(stream_TM) {}

  // Overwrites the stream at this rank's first layer of a pass with that of the stage before it, and sends it on
  // behind its last.
  void enter(const Stop& stop) override;
  void leave(const Stop& stop) override;

 private:
  const Decoder& decoder_;
  const at::Tensor& stream_TM_;
};

}  // namespace espalier
