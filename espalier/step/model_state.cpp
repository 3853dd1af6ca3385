#include "espalier/step/model_state.h"

#include <ATen/ATen.h>

#include "espalier/base/random.h"
#include "espalier/checkpoint/model_directory.h"
#include "espalier/ops/cpu/dispatch.h"

namespace espalier {
namespace {

bool is_norm(const std::string& name) { return name.find("norm") != std::string::npos; }
bool is_bias(const std::string& name) { return name.ends_with(".bias"); }

template <class T>
void fill(const Parameter& parameter, double deviation, Random random, T* out) {
  for (std::int64_t i = 0; i < parameter.count; ++i) {
    const double value = is_norm(parameter.name) ? 1 : is_bias(parameter.name) ? 0 : deviation * random.normal();
    out[i] = static_cast<T>(value);
  }
}

void load_weights(ModelState& state, const std::filesystem::path& directory, ValueHead head, Progress& progress) {
  state.source = directory;
  progress.begin("weights", state.table.size(), "parameters");
  load_parameters(
      directory, state.table, state.dtype, state.weights.data_ptr(),
      [&](std::int64_t done, std::int64_t) { progress.advance_to(done); }, head);
  progress.end();
}

}  // namespace

ModelState::ModelState(const ModelShape& model_shape, DType model_dtype)
    : shape(model_shape),
      dtype(model_dtype),
      table(shape),
      weights(at::empty({table.size()}, at::TensorOptions().dtype(scalar_type(dtype)))),
      decoder(shape, view_model(weights, table, shape)) {}

std::unique_ptr<ModelState> load_model(const std::filesystem::path& directory, DType dtype, Progress& progress) {
  auto state = std::make_unique<ModelState>(read_model_shape(directory), dtype);
  load_weights(*state, directory, ValueHead::stored, progress);
  return state;
}

std::unique_ptr<ModelState> load_value_model(const std::filesystem::path& directory, DType dtype, std::uint64_t seed,
                                             Progress& progress) {
  const CriticShape critic = read_critic_shape(directory);
  auto state = std::make_unique<ModelState>(critic.shape, dtype);
  if (!critic.head_is_stored) {
    const Parameter& weight = state->table.at(kValueWeight);
    dispatch(scalar_type(dtype), [&]<class T>() {
      fill(weight, critic.shape.initializer_range, Random(seed), pointer<T>(state->weights) + weight.offset);
    });
    progress.note(text_of(directory.string(), " is a language model: its critic gets a new value head"));
  }
  load_weights(*state, directory, critic.head_is_stored ? ValueHead::stored : ValueHead::fresh, progress);
  return state;
}

std::unique_ptr<ModelState> random_model(const ModelShape& shape, DType dtype, std::uint64_t seed) {
  auto state = std::make_unique<ModelState>(shape, dtype);
  const Random random(seed);
  dispatch(scalar_type(dtype), [&]<class T>() {
    std::uint64_t stream = 0;
    for (const Parameter& parameter : state->table.parameters())
      fill(parameter, shape.initializer_range, random.fork(stream++), pointer<T>(state->weights) + parameter.offset);
  });
  return state;
}

}  // namespace espalier
