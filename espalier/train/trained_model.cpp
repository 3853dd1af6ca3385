#include "espalier/train/trained_model.h"

#include <ATen/ATen.h>

#include "espalier/checkpoint/model_directory.h"
#include "espalier/device/host_values.h"
#include "espalier/ops/operations.h"

namespace espalier {

DType accumulator_of(DType dtype) { return dtype == DType::float64 ? DType::float64 : DType::float32; }

namespace {

DType saved_dtype(SaveDType asked, const ModelShape& shape) {
  return asked == SaveDType::source ? shape.stored_dtype : parse_dtype(name_of(asked));
}

}  // namespace

void write_trained_weights(const std::filesystem::path& directory, const ModelState& model, const AdamW& optimizer,
                           SaveDType save_dtype) {
  write_model_directory(directory, model.source, model.table, accumulator_of(model.dtype),
                        host_bytes(model.decoder.device().to_host(optimizer.masters())),
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
  const at::Tensor masters = device.to_host(optimizer.masters()), first = device.to_host(optimizer.exp_avg()),
                   second = device.to_host(optimizer.exp_avg_sq());
  save_run_state(directory, state, model.table, host_bytes(masters), host_bytes(first), host_bytes(second));
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
  RunState former = load_run_state(directory, fingerprint_of(model.shape), model.table, accumulator_of(model.dtype),
                                   host_bytes(read[0]), host_bytes(read[1]), host_bytes(read[2]));
  device.to_device(read[0], masters);
  device.to_device(read[1], first);
  device.to_device(read[2], second);
  optimizer.set_steps_done(former.step);
  if (model.dtype == DType::bfloat16) device.operations().convert(masters, model.weights);
  return former;
}

}  // namespace espalier
