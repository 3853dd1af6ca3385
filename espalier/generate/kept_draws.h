// The sets that top-k and top-p kept in a decoding step, and the log-probs of the drawn tokens over them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/device/device.h"
#include "espalier/parallel/group.h"
#include "espalier/rollout/rollout.h"

namespace espalier {

class KeptDraws {
 public:
  // Adds a block of rows, in order. Row b has the tokens [begin_b - begin_0, begin_{b + 1} - begin_0) of token_N;
  // `kept`: as ops/choice.h writes it. The log-probs come from the operations of the head, so that training finds the
  // same bits.
  void add(Device& device, const at::Tensor& logits_BV, double temperature, std::span<const std::int32_t> begin_B1,
           const at::Tensor& token_N, const at::Tensor& kept_BW);

  const std::vector<double>& logprobs() const { return logprob_; }  // of all tokens
  // The tokens that token n was drawn from, ascending; empty: the whole vocabulary.
  std::span<const std::int32_t> set_of(std::size_t n) const { return set_of_row_[row_of_token_[n]]; }

 private:
  std::vector<std::vector<std::int32_t>> set_of_row_;
  std::vector<std::size_t> row_of_token_;
  std::vector<double> logprob_;
};

// Gives every rank of dp the kept sets and full_logprobs of all responses, whose tokens it has already.
void gather_kept_sets(Group& dp, std::span<Rollout> rollouts);

}  // namespace espalier
