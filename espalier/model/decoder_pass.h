// A pass of a set of rows through the decoder: from token ids to the normalised hidden rows that the head reads, and
// back. The arithmetic of each stop (program/stops.h) is here; guests do the work around it (model/guest.h).
//
// Shapes: T rows, O output rows, M width, L layers of experts, k experts a row. The same code runs dense rows, packed
// trees, trunks, waves and the rows of a sampler. They differ in `ModelInput`, in the source of keys and values, and in
// the state kept for the backward.
#pragma once

#include <optional>
#include <vector>

#include "espalier/device/held_buffers.h"
#include "espalier/model/decoder.h"
#include "espalier/model/layer.h"
#include "espalier/program/item_state.h"

namespace espalier {

// Rows of the set in a layer that later layers read, where the source keeps them in buffers (KvSource::hold).
struct HeldRows {
  std::int64_t layer;
  KeysValues rows;
};

struct DecoderSaved {
  std::vector<HeldRows> read_later;
  at::Tensor layer_inputs_TW, embedded_TM;              // where layers have inputs (model/layer_inputs.h)
  ItemState state;                                      // the treatment of the layers' members
  std::vector<LayerSaved> layers;                       // the layers with a backward
  std::vector<Arena::Range> offload;                    // for each of these, the range that ItemState offloads
  at::Tensor final_stream_OM, normed_OM, final_rstd_O;  // undefined without output rows
  // Experts chosen by the rows, [L, max(T, O), k] (int32), if input.keeps_choices; a narrow last layer has its output
  // rows only.
  at::Tensor choice_LTK;
};

class DecoderForward {
 public:
  // Overwrites `saved`. All of it but choice_LTK, which is its own allocation, is taken from the arena and stays valid
  // until the caller releases it. `state`: the treatment of the layers' activations until the backward; empty without a
  // backward.
  DecoderForward(const Decoder& decoder, const DecoderRun& run, std::optional<ItemState> state, DecoderSaved& saved);

  void run(const Stop& stop);
  // Called after the last stop: saved.normed_OM is the input of the head.
  void finish();

  // The rows between two stops, [T, M]: before this rank's first layer its input, after the last layer its
  // output.
  const at::Tensor& stream_TM() const { return stream_TM_; }

 private:
  void hold_rows();
  void look_up();
  void run_layer(std::int64_t layer);
  void normalise();
  void keep_choices(const LayerContext& context, const LayerSaved& layer) const;

  const Decoder& decoder_;
  DecoderRun run_;
  bool saves_;
  DecoderSaved& saved_;
  StreamBuffer stream_;
  std::int64_t kept_from_ = 0;   // arena offset of streams and saved layers
  std::int64_t saved_from_ = 0;  // arena offset of the next layer's members
  at::Tensor stream_TM_;
};

class DecoderBackward {
 public:
  // Given dL/d(normed_OM), adds every parameter's gradient except the head's to `grads` (accumulator dtype), and this
  // set's contribution to the gradients of the keys and values that its rows attended to. The gradients that later rows
  // added to the set's own keys and values are included. Consumes `saved`. All arguments must outlive the object.
  DecoderBackward(const Decoder& decoder, const DecoderRun& run, DecoderSaved& saved, const at::Tensor& grad_normed_OM,
                  ModelViews& grads, const RouterPenalties& penalties);

  void run(const Stop& stop);

  // The gradient of the rows between two stops, [T, M].
  const at::Tensor& grad_stream_TM() const { return grad_stream_TM_; }

 private:
  void hold_gradients();
  void normalise();
  void run_layer(std::int64_t layer);
  void look_up();

  const Decoder& decoder_;
  DecoderRun run_;
  DecoderSaved& saved_;
  const at::Tensor& grad_normed_OM_;
  ModelViews& grads_;
  const RouterPenalties& penalties_;
  DecoderBackwardBuffers declared_;
  HeldBuffers held_;
  at::Tensor grad_stream_TM_;
  at::Tensor grad_stream_;  // grad_stream_TM, or the output rows' gradient above a narrow last block
};

// A forward without a backward, on one stage of pp.
DecoderSaved decoder_forward(const Decoder& decoder, const DecoderRun& run);

}  // namespace espalier
