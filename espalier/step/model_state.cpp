#include "espalier/step/model_state.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/base/random.h"
#include "espalier/checkpoint/model_directory.h"
#include "espalier/device/host_values.h"
#include "espalier/device/scalar_type.h"

namespace espalier {
namespace {

bool is_norm(const std::string& name) { return name.find("norm") != std::string::npos; }
bool is_bias(const std::string& name) { return name.ends_with(".bias"); }

// Overwrites a parameter of weights in the host's memory.
void fill(const Parameter& parameter, double deviation, Random random, const at::Tensor& host) {
  std::vector<double> values;
  for (std::int64_t begin = 0; begin < parameter.count; begin += static_cast<std::int64_t>(values.size())) {
    values.resize(static_cast<std::size_t>(std::min<std::int64_t>(1 << 16, parameter.count - begin)));
    for (double& value : values)
      value = is_norm(parameter.name) ? 1 : is_bias(parameter.name) ? 0 : deviation * random.normal();
    const auto count = static_cast<std::int64_t>(values.size());
    host.narrow(0, parameter.offset + begin, count).copy_(at::from_blob(values.data(), {count}, at::kDouble));
  }
}

LocalShape local_shape(const ModelShape& shape, const Mesh& mesh) { return {shape, mesh.degrees, mesh.place()}; }

// A critic's head that is not stored is drawn from `seed`.
void load_weights(ModelState& state, const std::filesystem::path& directory, ValueHead head, std::uint64_t seed,
                  Progress& progress) {
  state.source = directory;
  Device& device = state.decoder.device();
  const at::Tensor host = device.host_room(state.weights);
  if (head == ValueHead::fresh) fill(state.table.at(kValueWeight), state.shape.initializer_range, Random(seed), host);
  progress.begin("weights", state.table.size(), "parameters");
  load_parameters(
      directory, state.table, state.dtype, host_bytes(host),
      [&](std::int64_t done, std::int64_t) { progress.advance_to(done); }, head);
  device.to_device(host, state.weights);
  progress.end();
}

}  // namespace

ModelState::ModelState(const LocalShape& model_shape, DType model_dtype, Device& device, const Mesh& ranks)
    : mesh(ranks),
      shape(model_shape.whole()),
      dtype(model_dtype),
      table(model_shape),
      weights(device.allocate({table.size()}, scalar_type(dtype))),
      decoder(model_shape, view_model(weights, table, model_shape), device, ranks) {
  for (const Parameter& parameter : table.parameters())
    if (parameter.shard.padded()) device.operations().zero(weights.narrow(0, parameter.offset, parameter.count));
}

std::unique_ptr<ModelState> load_model(const std::filesystem::path& directory, DType dtype, Progress& progress,
                                       const Mesh& mesh) {
  auto state =
      std::make_unique<ModelState>(local_shape(read_model_shape(directory), mesh), dtype, bound_device(), mesh);
  load_weights(*state, directory, ValueHead::stored, 0, progress);
  return state;
}

std::unique_ptr<ModelState> load_value_model(const std::filesystem::path& directory, DType dtype, std::uint64_t seed,
                                             Progress& progress, const Mesh& mesh) {
  const CriticShape critic = read_critic_shape(directory);
  auto state = std::make_unique<ModelState>(local_shape(critic.shape, mesh), dtype, bound_device(), mesh);
  if (!critic.head_is_stored)
    progress.note(text_of(directory.string(), " is a language model: its critic gets a new value head"));
  load_weights(*state, directory, critic.head_is_stored ? ValueHead::stored : ValueHead::fresh, seed, progress);
  return state;
}

std::unique_ptr<ModelState> random_model(const ModelShape& shape, DType dtype, std::uint64_t seed, const Mesh& mesh) {
  auto state = std::make_unique<ModelState>(shape, dtype, bound_device(), mesh);
  const Random random(seed);
  const at::Tensor host = state->decoder.device().host_room(state->weights);
  std::uint64_t stream = 0;
  for (const Parameter& parameter : state->table.parameters())
    fill(parameter, shape.initializer_range, random.fork(stream++), host);
  state->decoder.device().to_device(host, state->weights);
  return state;
}

}  // namespace espalier
