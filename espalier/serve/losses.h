// The inputs of each loss, by their names on the wire.
#pragma once

#include <map>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "espalier/serve/calls.h"
#include "espalier/serve/engine.h"

namespace espalier::serve {

// A dense tensor as it came; a sparse one is filled up with zeros.
struct Tensor {
  std::vector<std::int64_t> shape;
  bool is_integer = false;
  std::vector<std::int64_t> integers;
  std::vector<float> floats;

  std::size_t size() const { return is_integer ? integers.size() : floats.size(); }
};

struct NamedDatum {
  std::vector<std::int32_t> tokens;
  std::map<std::string, Tensor> inputs;
};

using LossConfig = std::map<std::string, std::variant<double, std::string>>;

// The call that these data make. Errors: InputError, with datum and field, for a loss or an input that is not known,
// inputs that are missing, of another type, length or shape, not finite, or out of range; UnsupportedError for losses
// of the hosted service whose formula is not published.
TrainingCall training_call(const std::string& loss, const LossConfig& config, bool backward,
                           std::vector<NamedDatum> data, const BaseModel& model);

}  // namespace espalier::serve
