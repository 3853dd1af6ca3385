// Views of a flat buffer as a model: one tensor for each matrix of a product. Weights and gradients use the same
// type.
//
// Shapes: V vocabulary, M width, F inner width, E experts; all of them this rank's part (shape/local_shape.h). Absent
// parts (biases, the dense MLP of an expert layer and the experts of a dense one) are undefined tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "espalier/model/parameters.h"
#include "espalier/ops/low_rank.h"

namespace espalier {

// y = x weight^T + bias, and the addends of low rank of its parts.
struct Projection {
  at::Tensor weight, bias;  // [out, in], [out]
  std::vector<LowRank> low_rank;

  bool trains() const { return weight.defined() || bias.defined() || !low_rank.empty(); }  // for gradients
};

// A mixer's products and tensors by their numbers (PartParameters); those that it lacks are undefined. A tensor of
// several parts has one dimension, others have that of their files.
struct PartViews {
  std::vector<Projection> products;
  std::vector<Projection> behind;  // the outputs from ProductShape::split_at on; `products` then has those before
  std::vector<at::Tensor> tensors;
};

// The norms of experts and their shared expert apart (model/apart_experts.h).
struct ApartNorms {
  at::Tensor router_M, experts_M;                // before the router, before the experts
  at::Tensor behind_shared_M, behind_experts_M;  // of their results
};

struct LayerViews {
  at::ScalarType dtype = at::kFloat;  // dtype of rows; held matrices may be bfloat16 beside float32
  at::Tensor mixer_norm_M, mixer_norm_bias_M, mlp_norm_M, mlp_norm_bias_M;
  at::Tensor mixer_post_norm_M, mlp_post_norm_M;  // norms of each half's addition to the stream
  PartViews mixer;
  Projection gate_up;                              // [2*F, M], gate then up; without a gate [F, M]
  Projection down;                                 // [M, F]
  Projection router;                               // [E, M], all experts
  at::Tensor expert_gate_up_EWM, expert_down_EMF;  // [E, 2*F, M], [E, M, F], F of one expert
  at::Tensor expert_gate_up_bias_EW, expert_down_bias_EM;
  at::Tensor correction_bias_E;  // for the router's choice, accumulator dtype; has no gradient
  at::Tensor expert_scale_E;     // factors of experts' weights
  ApartNorms apart;
  Projection shared_gate_up, shared_down;   // of the shared expert, [2*F, M], [M, F]
  Projection shared_expert_gate;            // [1, M]
  Projection input_gate, input_projection;  // of the layer's input, [P, M] and [M, P]
  at::Tensor input_norm_M;
  // Pairs of all experts, A [E, r, M] and B [E, 2*F, r]; [E, r, F] and [E, M, r].
  std::vector<LowRank> expert_gate_up_low_rank, expert_down_low_rank;
};

// Calls visit for every projection of a layer except the experts'.
template <class Views, class Visit>
void for_each_projection(Views& layer, Visit visit) {
  for (auto& projection : layer.mixer.products) visit(projection);
  for (auto& projection : layer.mixer.behind) visit(projection);
  for (auto* const projection : {&layer.gate_up, &layer.down, &layer.router, &layer.shared_gate_up, &layer.shared_down,
                                 &layer.shared_expert_gate, &layer.input_gate, &layer.input_projection})
    visit(*projection);
}

struct ModelViews {
  at::Tensor embedding_VM;        // without padding, as head_VM
  at::Tensor layer_embedding_VW;  // inputs of all layers (LayerInputs), W = L P
  Projection layer_projection;    // [W, M]
  at::Tensor layer_projection_norm_P;
  std::vector<LayerViews> layers;  // this rank's layers
  at::Tensor final_norm_M, final_norm_bias_M;
  at::Tensor head_VM;                // the embedding itself if the head is tied; undefined in a critic
  LowRank head_low_rank;             // undefined where the head is not adapted
  at::Tensor value_M, value_bias_1;  // a critic's head; undefined elsewhere
};

// A flat buffer (contiguous, table.kept_size() elements), and the rooms for sharded units (table.units().rooms
// elements).
struct FlatParameters {
  const ParameterTable& table;
  at::Tensor flat, rooms;
  // For bfloat16 parameters in a mapped file instead of `flat`: the address of the named parameter's elements, behind
  // which the other parameters of the same product follow.
  std::function<const std::byte*(const std::string& name)> values = {};
};

// The same weights without what a run adds to them.
ModelViews without_additions(ModelViews views);

// Views into the buffers. Each parameter occurs in at most one buffer; a parameter in none is undefined. Rows have the
// dtype of the first buffer.
ModelViews view_model(std::span<const FlatParameters> buffers, const LocalShape& shape);

}  // namespace espalier
