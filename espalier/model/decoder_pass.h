// A pass of a set of rows through the decoder: from token ids to the normalised hidden rows that the head reads, and
// back. The arithmetic of each stop (program/stops.h); what else happens around it is the guests' (model/guest.h).
//
// Shapes: T rows, O output rows, M width, L layers of experts, k experts a row. The same code runs dense rows, packed
// trees, trunks, waves and the rows of a sampler: what differs is in `ModelInput`, in the source of keys and values,
// and in what is kept for the backward.
#pragma once

#include <optional>
#include <vector>

#include "espalier/device/held_buffers.h"
#include "espalier/model/decoder.h"
#include "espalier/model/layer.h"
#include "espalier/program/item_state.h"

namespace espalier {

struct DecoderSaved {
  ItemState state;                                      // of the layers' members
  std::vector<LayerSaved> layers;                       // those that a backward follows
  std::vector<Arena::Range> offload;                    // of each of these, what ItemState says is stored away
  at::Tensor final_stream_OM, normed_OM, final_rstd_O;  // undefined without output rows
  // Experts that rows chose, [L, max(T, O), k] (int32), where input.keeps_choices; a narrow last layer has only its
  // output rows.
  at::Tensor choice_LTK;
};

class DecoderForward {
 public:
  // Overwrites `saved`. Everything in it is taken from the arena and stays valid until the caller releases it. `state`:
  // what happens to the layers' activations until the backward; nothing where there is no backward.
  DecoderForward(const Decoder& decoder, const DecoderRun& run, std::optional<ItemState> state, DecoderSaved& saved);

  void run(const Stop& stop);
  // Behind the last stop: saved.normed_OM is the input of the head.
  void finish();

  // Rows between two stops, [T, M]: the input of this rank's first layer before it, its last layer's output behind
  // that.
  const at::Tensor& stream_TM() const { return stream_TM_; }

 private:
  void look_up();
  void run_layer(std::int64_t layer);
  void normalise();
  void keep_choices(const LayerContext& context, const LayerSaved& layer) const;

  const Decoder& decoder_;
  DecoderRun run_;
  bool saves_;
  DecoderSaved& saved_;
  StreamBuffer stream_;
  std::int64_t kept_from_ = 0;   // of the arena: streams and saved layers
  std::int64_t saved_from_ = 0;  // of these the next layer's
  at::Tensor stream_TM_;
};

class DecoderBackward {
 public:
  // Given dL/d(normed_OM), adds every parameter's gradient but the head's to `grads` (accumulator dtype), and this
  // set's part to the gradients of what its rows attended to. Consumes `saved`. The gradients that later rows added to
  // the set's own keys and values enter here. All arguments must outlive the object.
  DecoderBackward(const Decoder& decoder, const DecoderRun& run, DecoderSaved& saved, const at::Tensor& grad_normed_OM,
                  ModelViews& grads, const RouterPenalties& penalties);

  void run(const Stop& stop);

  // The gradient of the rows between two stops, [T, M].
  const at::Tensor& grad_stream_TM() const { return grad_stream_TM_; }

 private:
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
  at::Tensor grad_stream_;  // grad_stream_TM, or before a narrow last block the output rows'
};

// A forward that nothing follows, of one rank of pp.
DecoderSaved decoder_forward(const Decoder& decoder, const DecoderRun& run);

}  // namespace espalier
