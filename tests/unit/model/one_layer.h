// One layer of a tiny model on a few rows without a path: its parts by themselves, beside plain autograd.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <functional>
#include <memory>
#include <numeric>
#include <vector>

#include "espalier/gradient/gradient_set.h"
#include "espalier/model/decoder.h"
#include "espalier/model/layer.h"
#include "espalier/model/open_path.h"
#include "espalier/model/path_source.h"
#include "espalier/state/model_state.h"

namespace espalier::testing {

// float64 sums of a few dozen terms of size 1 in another order; the largest error is relative to the largest value.
inline constexpr double kSumsOfOneLayer = 1e-12;

inline double distance(const at::Tensor& found, const at::Tensor& expected) {
  return (found - expected).abs().max().item<double>() / std::max(1.0, expected.abs().max().item<double>());
}

// Calls visit(tensor, the same of the others...) for every parameter of a layer.
template <class Visit>
void for_each_parameter(LayerViews& of, LayerViews& other, Visit visit) {
  visit(of.mixer_norm_M, other.mixer_norm_M);
  visit(of.mixer_post_norm_M, other.mixer_post_norm_M);
  visit(of.mlp_norm_M, other.mlp_norm_M);
  visit(of.mlp_post_norm_M, other.mlp_post_norm_M);
  std::vector<Projection*> others;
  for_each_projection(other, [&](Projection& projection) { others.push_back(&projection); });
  std::size_t i = 0;
  for_each_projection(of, [&](Projection& projection) {
    visit(projection.weight, others[i]->weight);
    visit(projection.bias, others[i++]->bias);
  });
  visit(of.expert_gate_up_EWM, other.expert_gate_up_EWM);
  visit(of.expert_down_EMF, other.expert_down_EMF);
  visit(of.expert_gate_up_bias_EW, other.expert_gate_up_bias_EW);
  visit(of.expert_down_bias_EM, other.expert_down_bias_EM);
  visit(of.expert_scale_E, other.expert_scale_E);
  for (const auto norm :
       {&ApartNorms::router_M, &ApartNorms::experts_M, &ApartNorms::behind_shared_M, &ApartNorms::behind_experts_M})
    visit(of.apart.*norm, other.apart.*norm);
}

// All rows are at position 0, where rotations change nothing. Row i sees row j of the set if j <= i < ends[j].
class OneLayer {
 public:
  OneLayer(const ModelShape& shape, std::int64_t rows, const std::vector<std::int32_t>& outputs = {},
           std::int64_t layer_number = 0)
      : layer(layer_number), model(LocalShape(shape), DType::float64) {
    at::manual_seed(7);
    model.weights.normal_(0, 0.6);
    if (model.held_weights.numel() > 0) model.held_weights.normal_(0, 0.6);
    model.decoder.reserve_positions(1);
    gradients = std::make_unique<GradientSet>(model.table, model.decoder.local(), at::kDouble);
    gradients->zero();
    input.id.assign(static_cast<std::size_t>(rows), 0);
    input.position = input.id;
    input.output_row = outputs;
    input.output_position.assign(outputs.size(), 0);
    input.position_T = at::zeros({rows}, at::kInt);
    input.output_row_O = at::tensor(outputs, at::kInt);
    input.output_position_O = at::zeros({static_cast<std::int64_t>(outputs.size())}, at::kInt);
    ends = at::full({rows}, rows, at::kInt);
    path = std::make_unique<OpenPath>(model.decoder.shape(), 0, at::kDouble, true, arena);
    source = std::make_unique<PathSource>(*path, 0, false, ends);
    stream = at::randn({rows, shape.hidden}, at::kDouble);
  }

  // The layer is the model's last one: only there may it be narrow.
  LayerContext context(bool narrow = false, const RouterPenalties* penalties = nullptr) {
    const LayerContext last = model.decoder.layer({input, *source, arena}, layer, penalties);
    return {last.shape, last.own, last.weights, last.rotations, last.input, last.kv,
            last.layer, narrow,   last.arena,   last.timer,     last.mesh,  penalties};
  }
  const LayerShape& own() { return model.decoder.shape().layer[static_cast<std::size_t>(layer)]; }
  // Its weights as leaves of autograd.
  LayerViews leaves() const {
    LayerViews out = model.decoder.weights().layers[static_cast<std::size_t>(layer)];
    for_each_parameter(out, out, [](at::Tensor& tensor, at::Tensor&) {
      if (tensor.defined()) tensor = tensor.detach().clone().requires_grad_();
    });
    return out;
  }
  LayerViews& gradient() { return gradients->views().layers[static_cast<std::size_t>(layer)]; }

  // The distance of the gradients from the leaves' gradients: the largest distance of a parameter.
  double distance_from(LayerViews& leaves_with_gradients) {
    double largest = 0;
    for_each_parameter(gradient(), leaves_with_gradients, [&](at::Tensor& found, at::Tensor& leaf) {
      if (!found.defined() || !leaf.defined()) return;
      largest = std::max(largest, distance(found, leaf.grad().defined() ? leaf.grad() : at::zeros_like(leaf)));
    });
    return largest;
  }

  std::int64_t layer;
  ModelState model;
  std::unique_ptr<GradientSet> gradients;
  Arena arena{std::int64_t{1} << 26, cpu_device()};
  ModelInput input;
  at::Tensor ends, stream;
  std::unique_ptr<OpenPath> path;
  std::unique_ptr<PathSource> source;
  LayerSaved saved;
};

// --- The same in plain autograd ---

inline at::Tensor plain_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return weight.defined() ? weight * x * (x.square().mean(1, true) + eps).rsqrt() : x;
}

inline at::Tensor plain_product(const at::Tensor& x, const Projection& projection) {
  const at::Tensor out = x.mm(projection.weight.t());
  return projection.bias.defined() ? out + projection.bias : out;
}

// f(gate) up of [gate up].
inline at::Tensor plain_activation(const ActivationRule& rule, const at::Tensor& gate_up) {
  const auto f = [&](const at::Tensor& x) {
    switch (rule.kind) {
      case Activation::silu:
        return at::silu(x);
      case Activation::gelu_tanh:
        return at::gelu(x, "tanh");
      case Activation::relu_squared:
        return at::relu(x).square();
      default:
        throw std::logic_error("an activation that this test does not know");
    }
  };
  if (!rule.gated) return f(gate_up);
  const std::int64_t inner = gate_up.size(1) / 2;
  return f(gate_up.slice(1, 0, inner)) * gate_up.slice(1, inner);
}

// base + factor norm(x W^T + b).
inline at::Tensor plain_branch(const at::Tensor& base, const at::Tensor& x, const Projection& projection,
                               const at::Tensor& post_norm, const ModelShape& shape) {
  return base + shape.scales.residual * plain_norm(plain_product(x, projection), post_norm, shape.rms_norm_eps);
}

inline at::Tensor plain_dense_mlp(const at::Tensor& y, const LayerViews& w, const ModelShape& shape) {
  const at::Tensor normed = plain_norm(y, w.mlp_norm_M, shape.rms_norm_eps);
  const at::Tensor act = plain_activation(shape.activation, plain_product(normed, w.gate_up));
  return plain_branch(y, act, w.down, w.mlp_post_norm_M, shape);
}

}  // namespace espalier::testing
