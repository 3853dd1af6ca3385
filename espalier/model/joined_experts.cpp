#include "espalier/model/joined_experts.h"

#include "espalier/model/expert_mlp.h"

namespace espalier {

// Ranks of other trees have some of the experts. Ranks of one tree never join for experts alone.
void JoinedExperts::enter(const Stop& stop) {
  const Degrees& degrees = decoder_.mesh().degrees;
  if (!stop.is_layer() || !decoder_.shape().has_experts(stop.unit) || degrees.ep <= degrees.tp) return;
  const LayerContext c = decoder_.layer({no_rows_, no_keys_, arena_}, stop.unit);
  if (stop.pass == Pass::forward)
    join_experts_forward(c);
  else
    join_experts_backward(c, grads_->layers[static_cast<std::size_t>(stop.unit)]);
}

void join_decoder_forward(const Decoder& decoder, Arena& arena) {
  JoinedExperts experts(decoder, arena);
  walk(decoder_stops(decoder.local(), Pass::forward), {decoder.gathering(), &experts});
}

}  // namespace espalier
