#include "espalier/train/trained_model.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "espalier/checkpoint/model_directory.h"
#include "espalier/device/host_values.h"
#include "espalier/train/whole_values.h"

namespace espalier {

DType accumulator_of(DType dtype) { return dtype == DType::float64 ? DType::float64 : DType::float32; }

namespace {

DType saved_dtype(SaveDType asked, const ModelShape& shape) {
  return asked == SaveDType::source ? shape.stored_dtype : parse_dtype(name_of(asked));
}

// What another rank writes.
void give_values(const ParameterTable& table, const ParameterValues& values) {
  for (const Parameter& parameter : table.parameters()) values(parameter);
}

}  // namespace

void write_trained_weights(const std::filesystem::path& directory, const ModelState& model, const AdamW& optimizer,
                           SaveDType save_dtype) {
  const ParameterValues masters = whole_values(optimizer, optimizer.masters(), model.decoder.device());
  if (!model.mesh.writes()) return give_values(model.table, masters);
  write_model_directory(directory, model.source, model.table, accumulator_of(model.dtype), masters,
                        saved_dtype(save_dtype, model.shape));
}

void save_trained_model(const std::filesystem::path& directory, const ModelState& model, const AdamW& optimizer,
                        RunState state, SaveDType save_dtype) {
  state.step = optimizer.steps_done();
  state.model = fingerprint_of(model.shape);
  state.dtype = model.dtype;
  state.accumulators = accumulator_of(model.dtype);
  write_trained_weights(directory, model, optimizer, save_dtype);
  Device& device = model.decoder.device();
  const RunStateValues parts = {whole_values(optimizer, optimizer.masters(), device),
                                whole_values(optimizer, optimizer.exp_avg(), device),
                                whole_values(optimizer, optimizer.exp_avg_sq(), device)};
  if (model.mesh.writes()) return save_run_state(directory, state, model.table, parts);
  for (const ParameterValues& values : parts) give_values(model.table, values);
}

std::int64_t bytes_of_saved_model(const ModelShape& shape, const Options& options) {
  constexpr std::int64_t kParts = 3;  // masters and both moments
  const DType weights = saved_dtype(options.save_dtype, shape);
  return shape.parameters() * (bytes_of(weights) + kParts * bytes_of(accumulator_of(options.dtype)));
}

RunState continue_trained_model(const std::filesystem::path& directory, ModelState& model, AdamW& optimizer) {
  Device& device = model.decoder.device();
  const at::Tensor masters = optimizer.masters(), first = optimizer.exp_avg(), second = optimizer.exp_avg_sq();
  const at::Tensor read[] = {device.host_room(masters), device.host_room(first), device.host_room(second)};
  const AdamW::Range own = optimizer.own();
  const std::int64_t bytes = bytes_of(accumulator_of(model.dtype));
  const auto take = [&](std::size_t part, const Parameter& parameter, const std::byte* values) {
    const std::int64_t begin = std::max(own.begin, parameter.offset);
    const std::int64_t count = std::min(own.end, parameter.offset + parameter.count) - begin;
    if (count > 0)
      std::copy_n(values + (begin - parameter.offset) * bytes, count * bytes,
                  static_cast<std::byte*>(host_bytes(read[part])) + (begin - own.begin) * bytes);
  };
  RunState former =
      load_run_state(directory, fingerprint_of(model.shape), model.table, accumulator_of(model.dtype), take);
  device.to_device(read[0], masters);
  device.to_device(read[1], first);
  device.to_device(read[2], second);
  optimizer.set_steps_done(former.step);
  optimizer.masters_changed();
  return former;
}

}  // namespace espalier
