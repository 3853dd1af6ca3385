// The whole decoder, from token ids to the normalised hidden rows that the head reads, and back.
//
// Shapes: T rows, O output rows, M width. The same code runs dense rows, packed trees, trunks, waves and the rows of a
// sampler: what differs is in `ModelInput`, in the source of keys and values, and in what is kept for the backward.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "espalier/device/arena.h"
#include "espalier/model/kv_source.h"
#include "espalier/model/layer.h"
#include "espalier/model/layer_keeper.h"
#include "espalier/model/model_input.h"
#include "espalier/model/model_views.h"
#include "espalier/model/rotary.h"
#include "espalier/parallel/mesh.h"
#include "espalier/plan/item_state.h"

namespace espalier {

struct DecoderSaved {
  ItemState state;                                      // of the layers' members
  std::vector<LayerSaved> layers;                       // those that a backward follows
  at::Tensor final_stream_OM, normed_OM, final_rstd_O;  // undefined without output rows
  // Experts that rows chose, [L, max(T, O), k] (int32), where input.keeps_choices; a narrow last layer has only its
  // output rows.
  at::Tensor choice_LTK;
};

// Arguments common to the forward and the backward of a set of rows.
struct DecoderRun {
  const ModelInput& input;  // handed over
  KvSource& kv;
  Arena& arena;
  Timer* timer = nullptr;         // books the parts of the work; may be null
  LayerKeeper* keeper = nullptr;  // where the saved state of layers is kept, and asked for by the backward; may be null
};

class Decoder {
 public:
  // `weights` are read in every call and lie on the device; their dtype is the dtype of all activations. Mesh and the
  // weights' keeper must outlive the decoder; every rank of its tp calls forward and add_backward with the same rows.
  Decoder(const LocalShape& shape, ModelViews weights, Device& device, const Mesh& mesh = mesh_of_one());

  // Makes rotary tables for positions below `positions`; must cover every row.
  void reserve_positions(std::int64_t positions);
  std::int64_t positions() const { return rotary_.positions(); }

  // The result holds normed_OM, the input of the head. Everything in it is taken from the arena and stays valid until
  // the caller releases it. `state`: what happens to the layers' activations until the backward; nothing where there is
  // no backward. A keeper is there where members are stored away: it gets those of each
  // layer, and is asked for them by add_backward.
  DecoderSaved forward(const DecoderRun& run, std::optional<ItemState> state = std::nullopt) const;

  // Given dL/d(normed_OM), adds every parameter's gradient but the head's to `grads` (accumulator dtype), and this
  // set's part to the gradients of what its rows attended to. Consumes `saved`. The gradients that later rows added to
  // the set's own keys and values enter here.
  void add_backward(const DecoderRun& run, DecoderSaved& saved, const at::Tensor& grad_normed_OM, ModelViews& grads,
                    const RouterPenalties& penalties = {}) const;

  // Run by a rank without own rows while others run forward, or add_backward: its experts, on their rows, and
  // the gathers of sharded weights and of the layers that the others attend to (NoRows). join_backward adds to the
  // gradients of its experts.
  void join_forward(Arena& arena, KvSource& kv) const;
  void join_backward(ModelViews& grads, Arena& arena, KvSource& kv) const;

  const ModelShape& shape() const { return shape_; }  // of this rank
  const LocalShape& local() const { return local_; }
  const Mesh& mesh() const { return mesh_; }
  const ModelViews& weights() const { return weights_; }
  Device& device() const { return device_; }
  // False where none of its layers saves anything, since nothing in or below them trains.
  bool has_backward() const { return first_layer() < shape_.layers; }
  // The sizes that its buffer declarations depend on.
  BlockShape block() const;
  at::ScalarType dtype() const { return weights_.layers.front().down_or_experts().scalar_type(); }
  // What becomes of the head's product.
  LogitShape logits() const { return {shape_.scales.logits, shape_.scales.logit_cap}; }
  // Stages of pp hand streams on, and their gradients back. The first looks tokens up, the last has the outputs.
  bool is_first_stage() const { return mesh_.pp.rank() == 0; }
  bool is_last_stage() const { return mesh_.pp.rank() + 1 == mesh_.pp.size(); }

 private:
  // The input of this rank's first layer, and the use of its last layer's output. In the backward: the gradient of
  // the latter, grad_stream_OM or grad_stream_TM (overwritten), and the use of the gradient of the former.
  void enter(const ModelInput& input, const at::Tensor& stream_TM) const;
  void leave(const ModelInput& input, const at::Tensor& stream_TM, const DecoderSaved& saved) const;
  at::Tensor enter_backward(const ModelInput& input, const DecoderSaved& saved, const at::Tensor& grad_normed_OM,
                            ModelViews& grads, const at::Tensor& grad_stream_OM,
                            const at::Tensor& grad_stream_TM) const;
  void bring_layer(std::int64_t layer, std::int64_t next) const;
  void leave_backward(const ModelInput& input, const at::Tensor& grad_stream_TM, ModelViews& grads) const;
  // The backward ends here: nothing before it trains.
  std::int64_t first_layer() const { return shape_.trained.first_layer; }
  // False where the last block runs all rows, because its router's choices count.
  bool last_block_is_narrow(const ModelInput& input) const;
  void keep_choices(const LayerContext& context, const LayerSaved& layer, const at::Tensor& choice_LTK) const;
  bool joins_experts(std::int64_t layer) const;
  // Whether the layer runs no row of these past keys and values, while other ranks of ep may send theirs.
  bool only_joins(const LayerContext& context) const;
  LayerContext context(const DecoderRun& run, std::int64_t layer, const RouterPenalties* penalties = nullptr) const;

  const RotaryTables& rotary(std::int64_t layer) const;
  double embedding_factor() const;
  // The norm of `views`, which are the weights or their gradients.
  NormWeights final_norm(const ModelViews& views) const {
    return {views.final_norm_M, shape_.norm, views.final_norm_bias_M};
  }

  LocalShape local_;
  ModelShape shape_;  // of this rank: local_.own()
  ModelViews weights_;
  RotaryTables rotary_, window_rotary_, no_rotary_;
  Device& device_;
  const Mesh& mesh_;
};

}  // namespace espalier
