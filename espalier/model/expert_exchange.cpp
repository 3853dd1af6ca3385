#include "espalier/model/expert_exchange.h"

#include <ATen/core/Tensor.h>

#include <numeric>

#include "espalier/device/control_block.h"
#include "espalier/device/host_values.h"

namespace espalier {
namespace {

SortedSlots sort_slots(const LayerContext& c, const at::Tensor& choice_RK, std::int64_t experts) {
  Device& device = c.arena.device();
  const std::int64_t slots = choice_RK.numel();
  const SortedSlots sorted{device.allocate({experts + 1}, at::kInt), device.allocate({slots}, at::kInt),
                           device.allocate({slots}, at::kInt)};
  c.ops.sort_by_expert(choice_RK, sorted);
  return sorted;
}

// How many slots each rank sends to each expert of this one, [ranks, E], from how many this one sends to every expert.
std::vector<double> exchange_counts(const LayerContext& c, std::vector<double> counts) {
  Device& device = c.arena.device();
  const auto size = static_cast<std::int64_t>(counts.size()), ranks = static_cast<std::int64_t>(c.mesh.ep.size());
  const std::vector<std::int64_t> rows(static_cast<std::size_t>(ranks), size / ranks);
  const at::Tensor received = device.allocate({size}, at::kDouble);
  c.mesh.ep.exchange(device.upload(std::move(counts)), rows, received, rows);
  const at::Tensor on_host = device.to_host(received);
  const auto values = host_values<const double>(on_host);
  return {values.begin(), values.end()};
}

}  // namespace

ExpertExchange::ExpertExchange(const LayerContext& c, const at::Tensor& choice_RK) : context_(c), ep_(c.mesh.ep) {
  const std::int64_t rows = choice_RK.size(0), tp = c.mesh.tp.size(), of_tp = c.mesh.tp.rank();
  begin_ = rows * of_tp / tp;
  count_ = rows * (of_tp + 1) / tp - begin_;
  slots_ = count_ * choice_RK.size(1);
  sent_ = sort_slots(c, run_of(choice_RK), c.shape.experts);

  Device& device = c.arena.device();
  const at::Tensor begins = device.to_host(sent_.begin_E1);
  const auto begin = host_values<const std::int32_t>(begins);
  const auto ranks = static_cast<std::size_t>(ep_.size()), own = (begin.size() - 1) / ranks;  // experts of a rank
  std::vector<double> counts;
  for (std::size_t e = 0; e + 1 < begin.size(); ++e) counts.push_back(begin[e + 1] - begin[e]);
  for (std::size_t rank = 0; rank < ranks; ++rank) sent_to_.push_back(begin[(rank + 1) * own] - begin[rank * own]);

  const std::vector<double> arriving = exchange_counts(c, std::move(counts));
  std::vector<std::int32_t> expert;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    const std::size_t before = expert.size();
    for (std::size_t e = 0; e < own; ++e)
      expert.insert(expert.end(), static_cast<std::size_t>(arriving[rank * own + e]), static_cast<std::int32_t>(e));
    received_from_.push_back(static_cast<std::int64_t>(expert.size() - before));
  }
  arriving_ = static_cast<std::int64_t>(expert.size());
  at::Tensor choice_N;
  ControlBlock block;
  block.add(expert, choice_N);
  block.hand_over(device);
  received_ = sort_slots(c, choice_N.view({arriving_, 1}), static_cast<std::int64_t>(own));
}

at::Tensor ExpertExchange::to_experts(const at::Tensor& x, const at::Tensor& row_S) const {
  std::vector<std::int64_t> sizes = x.sizes().vec();
  sizes[0] = arriving_;
  const at::Tensor received = context_.arena.take(sizes, x.scalar_type());
  const ArenaScope scope(context_.arena);
  sizes[0] = slots_;
  const at::Tensor sent = context_.arena.take(sizes, x.scalar_type());
  context_.ops.gather(x, row_S, sent);
  ep_.exchange(sent, sent_to_, received, received_from_);
  return received;
}

at::Tensor ExpertExchange::rows_to_experts(const at::Tensor& x_R) const { return to_experts(x_R, sent_.row_S); }

at::Tensor ExpertExchange::slots_to_experts(const at::Tensor& x_RK) const {
  return to_experts(x_RK.view({slots_, 1}), sent_.slot_S);
}

at::Tensor ExpertExchange::from_experts(const at::Tensor& y_N) const {
  std::vector<std::int64_t> sizes = y_N.sizes().vec();
  sizes[0] = slots_;
  const at::Tensor received = context_.arena.take(sizes, y_N.scalar_type());
  ep_.exchange(y_N, received_from_, received, sent_to_);
  return received;
}

}  // namespace espalier
