#include "espalier/generate/kept_draws.h"

#include <bit>
#include <numeric>
#include <utility>

#include "espalier/device/control_block.h"
#include "espalier/device/host_values.h"
#include "espalier/objective/fused_head.h"
#include "espalier/rollout/kept_sets.h"

namespace espalier {
namespace {

// The ids of one row; none if all are kept.
std::vector<std::int32_t> ids_of_bits(std::span<const std::int32_t> words, std::int64_t vocabulary) {
  std::vector<std::int32_t> ids;
  for (std::size_t w = 0; w < words.size(); ++w)
    for (auto bits = static_cast<std::uint32_t>(words[w]); bits != 0; bits &= bits - 1)
      ids.push_back(static_cast<std::int32_t>(32 * w) + std::countr_zero(bits));
  if (std::ssize(ids) == vocabulary) ids.clear();
  return ids;
}

}  // namespace

void KeptDraws::add(Device& device, const at::Tensor& logits_BV, double temperature,
                    std::span<const std::int32_t> begin_B1, const at::Tensor& token_N, const at::Tensor& kept_BW) {
  const std::int64_t rows = logits_BV.size(0), vocabulary = logits_BV.size(1);
  const at::Tensor bits_on_host = device.to_host(kept_BW), tokens_on_host = device.to_host(token_N);
  const auto bits = host_values<const std::int32_t>(bits_on_host);
  const auto tokens = host_values<const double>(tokens_on_host);
  const auto words = static_cast<std::size_t>(kept_BW.size(1));
  std::vector<HeadEdge> edges;
  for (std::size_t row = 0; row < static_cast<std::size_t>(rows); ++row) {
    set_of_row_.push_back(ids_of_bits(bits.subspan(row * words, words), vocabulary));
    for (std::int32_t n = begin_B1[row]; n < begin_B1[row + 1]; ++n) {
      edges.push_back(
          {static_cast<std::int32_t>(row), static_cast<std::int32_t>(tokens[edges.size()]), set_of_row_.back()});
      row_of_token_.push_back(set_of_row_.size() - 1);
    }
  }
  HeadEdges of_head;
  ControlBlock block;
  of_head.add_to(block, std::vector<double>(static_cast<std::size_t>(rows), temperature), edges, vocabulary);
  block.hand_over(device);
  const std::vector<double> logprobs = logprobs_of_logits(logits_BV, of_head, 0, device);
  logprob_.insert(logprob_.end(), logprobs.begin(), logprobs.end());
}

// A rank without a response adds 0.
void gather_kept_sets(Group& dp, std::span<Rollout> rollouts) {
  std::vector<std::int64_t> sizes, ids;
  std::vector<double> full;
  for (Rollout& rollout : rollouts) {
    rollout.full_logprobs.resize(rollout.response_ids.size());
    full.insert(full.end(), rollout.full_logprobs.begin(), rollout.full_logprobs.end());
    for (std::size_t t = 0; t < rollout.response_ids.size(); ++t) sizes.push_back(std::ssize(rollout.kept_sets.at(t)));
  }
  add_over_ranks(dp, sizes);
  full = sums_over_ranks(dp, std::move(full));
  auto size = sizes.begin();
  for (const Rollout& rollout : rollouts) {
    const std::int64_t count = std::accumulate(size, size + rollout.response_length(), std::int64_t{0});
    size += rollout.response_length();
    ids.insert(ids.end(), rollout.kept_sets.ids.begin(), rollout.kept_sets.ids.end());
    if (rollout.kept_sets.empty()) ids.resize(ids.size() + static_cast<std::size_t>(count));
  }
  add_over_ranks(dp, ids);
  size = sizes.begin();
  auto id = ids.begin();
  auto logprob = full.begin();
  for (Rollout& rollout : rollouts) {
    rollout.kept_sets = {};
    for (double& value : rollout.full_logprobs) {
      value = *logprob++;
      add_kept_set(rollout.kept_sets, std::vector<std::int32_t>(id, id + *size));
      id += *size++;
    }
  }
}

}  // namespace espalier
