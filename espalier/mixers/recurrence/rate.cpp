// The rate of the rows of recurrent layers, measured.
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <chrono>
#include <vector>

#include "espalier/device/device.h"
#include "espalier/device/scalar_type.h"
#include "espalier/mixers/recurrence/layer.h"

namespace espalier {
namespace {

constexpr std::int64_t kRows = 256;

// All operations of the mixer on rows of a run, forward and backward. The numbers are 0, which cost what others do.
class Rows {
 public:
  Rows(const RecurrenceShape& shape, at::ScalarType dtype) : s_(shape) {
    const auto zeros = [&](at::IntArrayRef sizes, at::ScalarType type) {
      const at::Tensor out = cpu_device().allocate(sizes, type);
      cpu_device().operations().zero(out);
      return out;
    };
    const std::int64_t V = s_.value_width(), norm = s_.mamba ? V : s_.value_dim;
    const at::ScalarType sums = accumulator_type(dtype);
    projected_TW_ = zeros({kRows, s_.projected()}, dtype), grad_projected_TW_ = zeros({kRows, s_.projected()}, dtype);
    mixed_TV_ = zeros({kRows, V}, dtype), gated_TV_ = zeros({kRows, V}, dtype), grad_TV_ = zeros({kRows, V}, dtype);
    conv_CK_ = zeros({s_.channels(), s_.kernel}, dtype);
    of_heads_H_ = zeros({s_.value_heads}, dtype);
    dt_bias_ = zeros({s_.decays()}, dtype);
    norm_ = zeros({norm}, dtype), grad_norm_ = zeros({norm}, sums);
    grads_ = {.projected_TW = grad_projected_TW_,
              .conv_CK = zeros({s_.channels(), s_.kernel}, sums),
              .a_log_H = zeros({s_.value_heads}, sums),
              .dt_bias_H = zeros({s_.decays()}, sums),
              .conv_bias_C = {},
              .skip_H = s_.mamba ? zeros({s_.value_heads}, sums) : at::Tensor()};
  }

  void run() const {
    const Operations& ops = cpu_device().operations();
    std::vector<StateRun> runs(1);
    runs.front().end = kRows;
    const DeltaRuleProblem rows{
        s_, projected_TW_, conv_CK_, of_heads_H_, dt_bias_, {}, s_.mamba ? of_heads_H_ : at::Tensor(), runs};
    const GatedNormProblem gate{s_, 1e-6, mixed_TV_, projected_TW_, norm_};
    ops.delta_rule(rows, mixed_TV_);
    ops.gated_norm(gate, gated_TV_);
    ops.gated_norm(gate, gated_TV_);  // a backward makes them again
    ops.add_gated_norm_backward(gate, grad_TV_, gated_TV_, grad_projected_TW_, grad_norm_);
    ops.add_delta_rule_backward(rows, gated_TV_, grads_);
  }

 private:
  RecurrenceShape s_;
  at::Tensor projected_TW_, mixed_TV_, gated_TV_, grad_TV_, grad_projected_TW_, conv_CK_, of_heads_H_, dt_bias_, norm_,
      grad_norm_;
  DeltaRuleGradients grads_;
};

}  // namespace

double recurrence_flops_per_second(const Recurrence& mixer, at::ScalarType dtype) {
  const Rows rows(mixer.shape, dtype);
  rows.run();
  double best = 0;
  const MixerFlops flops = mixer.flops();
  for (int i = 0; i < 2; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    rows.run();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    best = std::max(best, static_cast<double>(kRows) * flops.row * (1 + flops.row_backward) / seconds.count());
  }
  return best;
}

}  // namespace espalier
