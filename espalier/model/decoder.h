// The decoder of one rank: its weights, its rotary tables, and the arguments of its layers in a pass
// (model/decoder_pass.h).
#pragma once

#include "espalier/model/guest.h"
#include "espalier/model/layer_context.h"
#include "espalier/model/model_views.h"
#include "espalier/model/rotary.h"
#include "espalier/parallel/mesh.h"

namespace espalier {

// Arguments common to the forward and the backward of a set of rows.
struct DecoderRun {
  const ModelInput& input;  // copied to the device before
  KvSource& kv;
  Arena& arena;
  Timer* timer = nullptr;                                      // times the parts of the work; may be null
  at::Tensor layer_inputs_TW = {}, grad_layer_inputs_TW = {};  // of all layers (model/layer_inputs.h); set by a pass
};

class Decoder {
 public:
  // `weights` are on the device and read in every pass; their dtype is the dtype of all activations. `gathering`
  // gathers sharded weights; null if weights are not sharded. Both and the mesh must outlive the decoder.
  Decoder(const LocalShape& shape, ModelViews weights, Device& device, const Mesh& mesh = mesh_of_one(),
          Guest* gathering = nullptr);

  // Builds rotary tables for positions below `positions`, which must cover every row.
  void reserve_positions(std::int64_t positions);
  // The tables of another decoder of the same model, without a copy.
  void share_positions(const Decoder& other);
  std::int64_t positions() const { return positions_; }

  const ModelShape& shape() const { return shape_; }  // of this rank
  const LocalShape& local() const { return local_; }
  const Mesh& mesh() const { return mesh_; }
  const ModelViews& weights() const { return weights_; }
  Guest* gathering() const { return gathering_; }
  Device& device() const { return device_; }
  // The backward ends at this layer, because nothing before it trains.
  std::int64_t first_layer() const { return shape_.trained.first_layer; }
  // False if no layer saves anything, because nothing in or before this rank's layers trains.
  bool has_backward() const { return first_layer() < shape_.layers(); }
  // The sizes on which its buffer declarations depend.
  BufferSizes sizes() const;
  at::ScalarType dtype() const { return weights_.layers.front().dtype; }
  // The changes applied to the head's product.
  LogitShape logits() const { return {shape_.scales.logits, shape_.scales.logit_cap}; }
  // The factor of looked-up rows.
  double embedding_factor() const;
  // The final norm in `views`: the weights or their gradients.
  NormWeights final_norm(const ModelViews& views) const {
    return {views.final_norm_M, shape_.norm, views.final_norm_bias_M};
  }
  // True if this rank's last block continues with output rows alone: on the last stage of pp, unless the block has
  // experts and the choices of all rows are counted.
  bool last_block_is_narrow(const ModelInput& input) const;
  LayerContext layer(const DecoderRun& run, std::int64_t layer, const RouterPenalties* penalties = nullptr) const;

 private:
  LocalShape local_;
  ModelShape shape_;  // this rank's part: local_.own()
  ModelViews weights_;
  std::int64_t positions_ = 0;
  std::vector<std::vector<RotaryTables>> rotations_;  // of each layer (Mixer::rotations)
  Device& device_;
  const Mesh& mesh_;
  Guest* gathering_;
};

}  // namespace espalier
