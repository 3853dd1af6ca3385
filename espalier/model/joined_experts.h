// The experts of a rank without own rows, applied to the rows of ranks that run a pass.
#pragma once

#include "espalier/model/decoder.h"
#include "espalier/model/guest.h"

namespace espalier {

class JoinedExperts final : public Guest {
 public:
  // A backward adds to the gradients of this rank's experts; `grads` may be null in a forward. All must outlive the
  // object.
  JoinedExperts(const Decoder& decoder, Arena& arena, ModelViews* grads = nullptr)
      : decoder_(decoder), arena_(arena), grads_(grads) {}

  void enter(const Stop& stop) override;

 private:
  class NoKeys final : public KvSource {
   public:
    void attend(const LayerAttention&, const at::Tensor&, const at::Tensor&) override {}
  };

  const Decoder& decoder_;
  Arena& arena_;
  ModelViews* grads_;
  ModelInput no_rows_;
  NoKeys no_keys_;
};

// Takes part, without rows, in a decoder_forward of other ranks.
void join_decoder_forward(const Decoder& decoder, Arena& arena);

}  // namespace espalier
