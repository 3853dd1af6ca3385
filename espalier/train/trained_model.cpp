#include "espalier/train/trained_model.h"

#include <ATen/ATen.h>

#include <utility>

#include "espalier/base/mutation.h"
#include "espalier/checkpoint/model_directory.h"

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
                        optimizer.masters().data_ptr(), saved_dtype(save_dtype, model.shape));
}

void save_trained_model(const std::filesystem::path& directory, const ModelState& model, const AdamW& optimizer,
                        RunState state, SaveDType save_dtype) {
  state.step = optimizer.steps_done();
  state.model = fingerprint_of(model.shape);
  state.dtype = model.dtype;
  state.accumulators = accumulator_of(model.dtype);
  write_trained_weights(directory, model, optimizer, save_dtype);
  save_run_state(directory, state, model.table, optimizer.masters().data_ptr(), optimizer.exp_avg().data_ptr(),
                 optimizer.exp_avg_sq().data_ptr());
}

std::int64_t bytes_of_saved_model(const ModelShape& shape, const Options& options) {
  constexpr std::int64_t kParts = 3;  // masters and both moments
  const DType weights = saved_dtype(options.save_dtype, shape);
  return shape.parameters() * (bytes_of(weights) + kParts * bytes_of(accumulator_of(options.dtype)));
}

RunState continue_trained_model(const std::filesystem::path& directory, ModelState& model, AdamW& optimizer) {
  at::Tensor first = optimizer.exp_avg(), second = optimizer.exp_avg_sq();
  if (ESPALIER_MUTATION(moments_swapped_after_resume)) std::swap(first, second);
  RunState former = load_run_state(directory, fingerprint_of(model.shape), model.table, accumulator_of(model.dtype),
                                   optimizer.masters().data_ptr(), first.data_ptr(), second.data_ptr());
  if (ESPALIER_MUTATION(masters_rounded_after_resume)) optimizer.masters().copy_(optimizer.masters().to(at::kBFloat16));
  if (!ESPALIER_MUTATION(stale_step_after_resume)) optimizer.set_steps_done(former.step);
  if (model.dtype == DType::bfloat16) model.weights.copy_(optimizer.masters());
  return former;
}

}  // namespace espalier
