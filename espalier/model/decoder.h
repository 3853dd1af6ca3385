// The whole decoder, from token ids to the normalised hidden rows that the head reads, and back.
//
// Shapes: T rows, O output rows, M width. The same code runs dense rows, packed trees, trunks and waves: what differs
// is in `ModelInput` and in what is kept for the backward.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "espalier/device/arena.h"
#include "espalier/model/kv_path.h"
#include "espalier/model/layer.h"
#include "espalier/model/layer_keeper.h"
#include "espalier/model/model_input.h"
#include "espalier/model/model_views.h"
#include "espalier/model/rotary.h"
#include "espalier/parallel/mesh.h"

namespace espalier {

enum class Keep {
  everything,  // backward needs no recomputation
  streams,     // each block's input; backward runs each block's forward once more
  nothing,     // forward only
};

struct DecoderSaved {
  Keep keep = Keep::nothing;
  std::vector<LayerSaved> layers;
  at::Tensor final_stream_OM, normed_OM, final_rstd_O;  // undefined without output rows
  // Experts that rows chose, [L, max(T, O), k] (int32), where rows.keeps_choices; a narrow last layer has only its
  // output rows.
  at::Tensor choice_LTK;
};

class Decoder {
 public:
  // `weights` are read in every call and lie on the device; their dtype is the dtype of all activations. The mesh must
  // outlive the decoder; every rank of its tp calls forward and add_backward with the same rows.
  Decoder(const LocalShape& shape, ModelViews weights, Device& device, const Mesh& mesh = mesh_of_one());

  // Makes rotary tables for positions below `positions`; must cover every row.
  void reserve_positions(std::int64_t positions);
  std::int64_t positions() const { return rotary_.positions(); }

  // Runs the rows, which were handed over, over the path. The result holds normed_OM, the input of the head. Everything
  // in it is taken from the arena and stays valid until the caller releases it. Times of its parts are booked where
  // there is a timer. A keeper, where everything is kept, gets each layer's saved state, and is asked for it by
  // add_backward.
  DecoderSaved forward(const ModelInput& rows, KvPath& path, Keep keep, Arena& arena, Timer* timer = nullptr,
                       LayerKeeper* keeper = nullptr) const;

  // Given dL/d(normed_OM), adds every parameter's gradient but the head's to `grads` (accumulator dtype), and this
  // set's part to the gradients of the path. Consumes `saved`. In a trunk the gradients gathered in the path enter
  // here.
  void add_backward(const ModelInput& rows, KvPath& path, DecoderSaved& saved, const at::Tensor& grad_normed_OM,
                    ModelViews& grads, Arena& arena, Timer* timer = nullptr, LayerKeeper* keeper = nullptr) const;

  const ModelShape& shape() const { return shape_; }  // of this rank
  const LocalShape& local() const { return local_; }
  const Mesh& mesh() const { return mesh_; }
  const ModelViews& weights() const { return weights_; }
  Device& device() const { return device_; }
  // What the declarations of its buffers depend on.
  BlockShape block() const;
  at::ScalarType dtype() const { return weights_.embedding_VM.scalar_type(); }

 private:
  // False where the last block runs all rows, because its router's choices count.
  bool last_block_is_narrow(const ModelInput& rows) const;
  void keep_choices(const LayerContext& context, const LayerSaved& layer, const at::Tensor& choice_LTK) const;
  LayerContext context(const ModelInput& rows, KvPath& path, std::int64_t layer, Arena& arena, Timer* timer) const;

  LocalShape local_;
  ModelShape shape_;  // of this rank: local_.own()
  ModelViews weights_;
  RotaryTables rotary_;
  Device& device_;
  const Mesh& mesh_;
};

}  // namespace espalier
