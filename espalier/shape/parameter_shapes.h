// The parameters of a model, described once: the norms of its blocks and what their parts list
// (shape/part_parameters.h), with names, sizes and sharded sides. Counts, tables, views, FLOPs and shards are derived
// from this.
//
// M width, F inner width, E experts, V vocabulary.
#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "espalier/shape/file_place.h"
#include "espalier/shape/model_shape.h"
#include "espalier/shape/part_parameters.h"

namespace espalier {

// The numbers of an MLP's products (PartParameters).
struct DenseProductNumbers {
  enum : std::size_t { gate_up, down, input_gate, input_projection };  // the latter two of LayerInputs
};
struct ExpertProductNumbers {
  enum : std::size_t { router, gate_up, down, shared_gate_up, shared_down, shared_gate };
};
// And of its tensors.
struct ExpertTensorNumbers {
  enum : std::size_t { correction, router_scale, expert_scale, expert_norm, shared_post_norm, expert_post_norm };
};

// Parameters of one layer. Names follow layer_prefix, names of experts expert_prefix.
struct LayerParameters {
  NormShape mixer_norm, mixer_post_norm, mlp_norm, mlp_post_norm;
  PartParameters mixer, mlp;
  std::int64_t experts = 0;  // of which each has the MLP's `chosen` products; 0: there are none

  std::int64_t parameters() const;       // without additions
  std::int64_t low_rank() const;         // elements of additions, without the experts'
  std::int64_t expert_low_rank() const;  // of one expert
};

// With the ranks of the layer's additions.
LayerParameters layer_parameters(const ModelShape& shape, const LayerShape& layer);

// Calls visit(projection, its product, the bit that AdaptedLayer has of it) for every projection of a layer. Each of
// them can be adapted; gate and up of experts are joint.
template <class Parameters, class Adapted, class Visit>
void for_each_projection(Parameters& p, Adapted& adapted, Visit visit) {
  const auto of_part = [&](auto& part, auto& bits) {
    std::uint32_t bit = 1;
    for (auto& product : part.products())
      for (auto& projection : product.parts) {
        visit(projection, product, bits, bit);
        bit <<= 1;
      }
  };
  of_part(p.mixer, adapted.mixer);
  of_part(p.mlp, adapted.mlp);
}

std::string layer_prefix(std::int64_t layer);  // "model.layers.3."
// The name of a module in transformers from that in files: block_sparse_moe is mlp there, and f_a_proj and f_b_proj of
// Kimi Linear are parts of forget_gate.
std::string module_name(const std::string& name);
// "model.layers.3.mlp.experts.7."
std::string expert_prefix(const ModelShape& shape, std::int64_t layer, std::int64_t expert);

// Parameters below and above the layers.
struct OuterParameters {
  ProjectionShape embedding;
  NormShape final_norm;
  ProjectionShape head;  // nothing (0 by M) where it is the embedding
  // LayerInputs: the table, the product of embedded rows for all layers, and the norm of a layer's part of it.
  ProjectionShape layer_embedding, layer_projection;
  NormShape layer_projection_norm;
};
OuterParameters outer_parameters(const ModelShape& shape);
// True for the parameters of LayerInputs among these.
bool of_layer_inputs(const OuterParameters& outer, const std::string& parameter);
// The head with its addition, also where it is tied: the addition then changes the logits alone.
ProjectionShape adapted_head(const ModelShape& shape);

// The parameters that are read as one: the matrices of a product, their biases, or the tensors of a row. The parameters
// of all experts of a layer have one place.
struct ReadTogether {
  std::int64_t layer = -1;
  enum class Of : std::uint8_t { none, mixer_product, mixer_bias, mixer_tensor, mlp_product, mlp_bias, mlp_tensor };
  Of of = Of::none;
  std::size_t number = 0;  // of the product or the tensor in its part

  bool is_product() const { return of == Of::mixer_product || of == Of::mlp_product; }
  bool is_bias() const { return of == Of::mixer_bias || of == Of::mlp_bias; }
  bool in_mixer() const { return of == Of::mixer_product || of == Of::mixer_bias || of == Of::mixer_tensor; }
  auto operator<=>(const ReadTogether&) const = default;
};

// The first values of a row: as a parameter of the model starts (state/model_state.h); or, of an addition, uniform
// within 1 / sqrt(inputs), or 0, so that it adds nothing at first.
enum class Start : std::uint8_t { own, uniform, zero };

// A row of the table of parameters.
struct ParameterShape {
  std::string name;
  std::vector<Side> sides;               // [out, in] of a matrix, [out] of a bias, [width] of a norm
  std::int64_t layer = -1, expert = -1;  // -1: of none
  bool of_mixer = false;                 // of the layer's mixer
  bool of_heads = false;                 // read by heads: a rank with some of the heads has a part of its gradient
  FilePlace file = {};                   // in the model's files; of an added row, in peft's
  bool trains = true;                    // false: the parameter is held and never changes
  bool added = false;                    // of an addition: absent from the model's files (shape/additions.h)
  Start start = Start::own;
  bool narrow = false;     // held, in bfloat16 beside float32 (TrainedParameters::narrow)
  bool mapped = false;     // narrow, and read in a file (TrainedParameters::mapped_parameters)
  bool quantised = false;  // held, in few bits (TrainedParameters::quantised_parameters)
  bool in_parts = false;   // where it is whole, a rank of tp has a part of its gradient
  ReadTogether read = {};  // none: of no part, or read alone
};

// weight += s b a: names of parameters. Several may have the same a.
struct AddedPair {
  std::string a, b, weight;
  std::string module;  // of transformers: "model.layers.0.self_attn.q_proj"; "model.layers.0.mlp.experts.down_proj"
  std::int64_t layer = -1, expert = -1;
};
std::vector<AddedPair> added_pairs(const ModelShape& shape);

// The parameters of a table, or of a list of units. Held parameters are narrow (in memory or mapped), quantised,
// or neither.
enum class Parameters { all, trained, held, narrow, mapped, quantised };
inline bool belongs(const ParameterShape& parameter, Parameters which) {
  switch (which) {
    case Parameters::all:
      return true;
    case Parameters::trained:
      return parameter.trains;
    case Parameters::held:
      return !parameter.trains && !parameter.narrow && !parameter.quantised;
    case Parameters::narrow:
      return parameter.narrow && !parameter.mapped;
    case Parameters::mapped:
      return parameter.mapped;
    case Parameters::quantised:
      return parameter.quantised;
  }
  return false;
}

// Elements of trained matrices and additions in layers: the experts', and all others.
struct TrainedWeights {
  std::int64_t layers = 0, experts = 0;
};
TrainedWeights trained_weights(const ModelShape& shape);

// Correction biases of routers decide between experts by their last digits: files hold them as the model's own do.
inline bool keeps_its_dtype(const std::string& name) {
  return name.ends_with("e_score_correction_bias") || name.ends_with(".expert_bias");
}

// True for matrices that only products and look-ups read, without additions and routers, which are small.
bool is_read_by_products(const ModelShape& shape, const ParameterShape& p);

// In the order of the flat buffer. Matrices that one product reads together (q, k, v; gate, up) are neighbours, and
// then their biases; so are gate and up of all experts of a layer, then down of all of them, and then their biases
// likewise.
void for_each_parameter(const ModelShape& shape, const std::function<void(const ParameterShape&)>& visit);

}  // namespace espalier
