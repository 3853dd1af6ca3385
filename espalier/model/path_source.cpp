#include "espalier/model/path_source.h"

#include <ATen/core/Tensor.h>

namespace espalier {

KeysValues PathSource::kept(std::int64_t layer) const {
  if (const auto held = held_.find(layer); held != held_.end()) return held->second.rows;
  if (!keeps_in_path(layer)) return {};
  const OpenPath::Layer own = path_.top(layer);
  return {own.k.flatten(1), own.v.flatten(1)};
}

namespace {

// The last rows, as many as `like` has, as a matrix.
at::Tensor last_of(const at::Tensor& rows_TW, const at::Tensor& like) {
  const at::Tensor flat = rows_TW.flatten(1);
  return flat.narrow(0, flat.size(0) - like.size(0), like.size(0));
}

}  // namespace

void PathSource::leave(const LayerAttention& a) {
  if (!is_trunk_ || path_.keeps_all(a.layer)) return;
  const OpenPath::Layer kept = path_.top(a.layer);
  a.ops.convert(last_of(a.own.k, kept.k), kept.k.flatten(1));
  a.ops.convert(last_of(a.own.v, kept.v), kept.v.flatten(1));
}

void PathSource::add_gathered(const Operations& ops, std::int64_t layer, const KeysValues& grad_own) const {
  if (!is_trunk_ || path_.keeps_all(layer)) return;
  path_.expect_complete(layer);
  const OpenPath::Layer kept = path_.top(layer);
  ops.convert(kept.grad_k.flatten(1), last_of(grad_own.k, kept.grad_k));
  ops.convert(kept.grad_v.flatten(1), last_of(grad_own.v, kept.grad_v));
}

void PathSource::hold_gradients(const Operations& ops, std::int64_t layer, const KeysValues& gradients) {
  held_.at(layer).gradients = gradients;
  ops.zero(gradients.k);
  ops.zero(gradients.v);
  add_gathered(ops, layer, gradients);
}

KeysValues PathSource::gathered(std::int64_t layer) const {
  if (const auto held = held_.find(layer); held != held_.end()) return held->second.gradients;
  if (!is_trunk_ || !path_.keeps_all(layer)) return {};
  path_.expect_complete(layer);
  const OpenPath::Layer own = path_.top(layer);
  return {own.grad_k, own.grad_v};
}

std::vector<StateRun> PathSource::runs(std::int64_t layer, const at::Tensor& states_FN,
                                       const at::Tensor& grad_states_FN) const {
  const bool backward = grad_states_FN.defined();
  if (is_trunk_ && backward) path_.expect_complete(layer);
  const OpenPath::State above = path_.state_above(layer, path_rows_),
                        own = is_trunk_ ? path_.state_of_top(layer) : OpenPath::State{};
  std::vector<StateRun> out;
  for (const RowRun& run : runs_) {
    StateRun one;
    one.begin = run.begin, one.end = run.end, one.forks = run.fork >= 0;
    one.start_N = run.parent < 0 ? above.state_N : states_FN[runs_[static_cast<std::size_t>(run.parent)].fork];
    one.end_N = one.forks ? states_FN[run.fork] : own.state_N;
    if (backward) {
      one.grad_start_N =
          run.parent < 0 ? above.grad_state_N : grad_states_FN[runs_[static_cast<std::size_t>(run.parent)].fork];
      one.grad_end_N = one.forks ? grad_states_FN[run.fork] : own.grad_state_N;
    }
    out.push_back(std::move(one));
  }
  return out;
}

AttentionProblem PathSource::problem(const LayerAttention& a, const OpenPath::Layer& path) const {
  return {a.head_dim,     a.q_RW,   a.own.k,  a.own.v, path.k,     path.v, a.output_row_R,
          subtree_end_T_, a.window, depth_T_, a.scale, a.soft_cap, true};
}

void PathSource::attend(const LayerAttention& a, const at::Tensor& attended_RW, const at::Tensor& lse_HR) {
  if (a.q_RW.size(0) == 0) return;
  const TimedPart timed(a.timer, part::kAttention);
  a.ops.attention(problem(a, path_.path(a.source, path_rows_)), attended_RW, lse_HR);
}

void PathSource::add_backward(const LayerAttention& a, const at::Tensor& attended_RW, const at::Tensor& lse_HR,
                              const at::Tensor& grad_attended_RW, const at::Tensor& grad_q_RW,
                              const KeysValues& grad_own) {
  const OpenPath::Layer path = path_.path(a.source, path_rows_);
  if (a.q_RW.size(0) > 0) {
    const TimedPart timed(a.timer, part::kAttention);
    a.ops.add_attention_backward(problem(a, path), attended_RW, lse_HR, grad_attended_RW,
                                 {grad_q_RW, grad_own.k, grad_own.v, path.grad_k, path.grad_v});
  }
  path_.count_contribution(a.layer, path_rows_);
}

}  // namespace espalier
