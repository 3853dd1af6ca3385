// ForwardBackwardRequest and ForwardBackwardOutput of the tinker SDK, as bytes of protobuf.
// Source: the descriptor in tinker 0.38.0, tinker/proto/tinker_public.proto.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/serve/losses.h"
#include "espalier/serve/wire.h"

namespace espalier::serve {

// Numbers of a request's tensors, after sparse ones are filled up.
inline constexpr std::int64_t kMostNumbers = std::int64_t{1} << 28;
inline constexpr std::int64_t kMostData = 65536;

struct ForwardBackwardRequest {
  std::string model_id;
  std::int64_t seq_id = 0;
  std::string loss_fn;
  LossConfig config;
  bool forward_only = false;
  std::vector<NamedDatum> data;
  std::optional<ErrorText>
      refused;               // what is wrong beyond model and seq_id, which are good: the request takes its turn
  bool unsupported = false;  // the refusal is one of a thing that is valid elsewhere
};

// Unknown fields are passed over. Errors: InputError for bytes that have no readable model_id and seq_id.
ForwardBackwardRequest read_forward_backward(Bytes message);

// Log-probs in the order of the call's data.
std::string write_forward_backward(const TrainingAnswer& answer, const TrainingCall& call);

}  // namespace espalier::serve
