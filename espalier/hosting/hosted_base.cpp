#include "espalier/hosting/hosted_base.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "espalier/base/error.h"
#include "espalier/config/rope_config.h"
#include "espalier/generate/decoding.h"
#include "espalier/generate/end_tokens.h"
#include "espalier/state/trained_choice.h"

namespace espalier {
namespace {

TrainedChoice held_choice(const Options& options) {
  TrainedChoice choice = scored_choice(options);
  choice.frozen = true;
  return choice;
}

}  // namespace

HostedBase::HostedBase(std::string name, const std::filesystem::path& folder, const Options& options,
                       Progress& progress)
    : name_(std::move(name)),
      model_(load_model(folder, options.dtype, progress, mesh_of_one(), held_choice(options))),
      end_tokens_(espalier::end_tokens(folder)),
      tokenizer_(folder.string()) {
  for (const std::int32_t id : end_tokens_)
    if (id < 0 || id >= model_->shape.vocabulary)
      throw InputError({folder.string() + ": eos_token_id",
                        text_of("a token id in [0, ", model_->shape.vocabulary, ")"), text_of(id), ""});
}

void HostedBase::hold_weights(bool hold) {
  if (!hold)
    held_.reset();
  else if (!held_)
    held_ = espalier::hold_weights(model_->decoder);
}

// Frequencies of some models depend on the number of positions; theirs are made for the whole context once, so that
// a row has the same bits whatever else runs.
void HostedBase::reserve_positions(Decoder& decoder, std::int64_t positions) {
  if (positions <= decoder.positions()) return;
  const ModelShape& shape = model_->shape;
  const bool whole = longrope_of(shape).has_value();
  const auto reserved = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(positions)));
  model_->decoder.reserve_positions(whole ? shape.max_positions : std::min(reserved, shape.max_positions));
  if (&decoder != &model_->decoder) decoder.share_positions(model_->decoder);
}

}  // namespace espalier
