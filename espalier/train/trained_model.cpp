#include "espalier/train/trained_model.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <utility>

#include "espalier/base/error.h"
#include "espalier/checkpoint/added_values.h"
#include "espalier/checkpoint/model_directory.h"
#include "espalier/device/host_values.h"
#include "espalier/train/whole_values.h"

namespace espalier {

DType accumulator_of(DType dtype) { return dtype == DType::float64 ? DType::float64 : DType::float32; }

DType saved_dtype(SaveDType asked, const ModelShape& shape) {
  return asked == SaveDType::source ? shape.stored_dtype : parse_dtype(name_of(asked));
}

namespace {

// Additions to a source in fewer bits are kept as their masters are.
ModelShape shape_as_masters(ModelShape shape, DType accumulator) {
  shape.stored_dtype = accumulator;
  return shape;
}

void write_weights(const std::filesystem::path& directory, const ModelState& model, const AdamW& optimizer,
                   const WholeValues& whole, SaveDType save_dtype, const std::string& base) {
  const ParameterValues masters = whole.of(optimizer.masters(), optimizer);
  if (!model.mesh.writes()) return whole.give(masters);
  if (model.shape.trained.added.exist()) {
    const DType accumulator = accumulator_of(model.dtype);
    return write_added_values(directory, model.shape, base.empty() ? model.source.string() : base, whole.table(),
                              accumulator, masters,
                              saved_dtype(save_dtype, shape_as_masters(model.shape, accumulator)));
  }
  write_changed_model(directory, model, whole, masters, saved_dtype(save_dtype, model.shape));
}

}  // namespace

void write_changed_model(const std::filesystem::path& directory, const ModelState& model, const WholeValues& whole,
                         const ParameterValues& masters, DType to) {
  std::optional<StoredTensors> stored;
  if (!model.shape.trained.all()) stored.emplace(model.source);
  write_model_directory(directory, model.source, ParameterTable(model.shape), accumulator_of(model.dtype), masters, to,
                        {.stored = stored ? &*stored : nullptr,
                         .changed = [&](const std::string& name) { return whole.table().contains(name); },
                         .of_sequences = scores_sequences(model.shape),
                         .progress = {}});
}

void write_own_parameters(const std::filesystem::path& directory, const ModelState& model) {
  ModelShape shape = model.shape;
  shape.trained = {};
  const ParameterTable table(shape);
  const StoredTensors stored(model.source, table);
  const bool alike = std::ranges::all_of(table.parameters(), [&](const Parameter& p) {
    return stored.at(p.name).type == tensor_type_of(shape.stored_dtype);
  });
  const DType to = alike ? shape.stored_dtype : accumulator_of(model.dtype);
  const ParameterValues none = [](const Parameter& p) -> const void* {
    ESPALIER_INTERNAL(false, p.name, " is not as its source has it");
    return nullptr;
  };
  write_model_directory(directory, model.source, table, to, none, to,
                        {.stored = &stored,
                         .changed = [](const std::string&) { return false; },
                         .of_sequences = scores_sequences(shape),
                         .progress = {}});
}

void write_trained_weights(const std::filesystem::path& directory, const ModelState& model, const AdamW& optimizer,
                           SaveDType save_dtype, const std::string& base, const std::function<void()>& between) {
  write_weights(directory, model, optimizer, WholeValues(model, between), save_dtype, base);
}

namespace {

std::optional<SumOrder> sum_order_of_run(const ModelState& model) {
  if (model.mesh.world.size() == 1 || model.decoder.device().in_host_memory()) return std::nullopt;
  return sum_order_of([](const char* name) { return std::getenv(name); });
}

}  // namespace

std::string other_sum_order(const RunState& former, const ModelState& model) {
  const std::optional<SumOrder> now = sum_order_of_run(model);
  if (!former.sum_order || !now) return "";
  const std::string differing = difference(*former.sum_order, *now);
  if (differing.empty()) return "";
  return text_of("NCCL sums in another order than before: ", differing, "; gradients may differ in their last bits");
}

void save_trained_model(const std::filesystem::path& directory, const ModelState& model, const AdamW& optimizer,
                        RunState state, SaveDType save_dtype, const std::string& base,
                        const std::function<void()>& between) {
  state.step = optimizer.steps_done();
  state.model = fingerprint_of(model.shape);
  state.dtype = model.dtype;
  state.accumulators = accumulator_of(model.dtype);
  state.sum_order = sum_order_of_run(model);
  const WholeValues whole(model, between);
  write_weights(directory, model, optimizer, whole, save_dtype, base);
  const RunStateValues parts = {whole.of(optimizer.masters(), optimizer), whole.of(optimizer.exp_avg(), optimizer),
                                whole.of(optimizer.exp_avg_sq(), optimizer)};
  if (model.mesh.writes()) return save_run_state(directory, state, whole.table(), parts);
  for (const ParameterValues& values : parts) whole.give(values);
}

void note_changed_files(const ModelState& model, Progress& progress) {
  if (!model.mapped) return;
  if (const std::filesystem::path file = model.mapped->changed_file(); !file.empty())
    progress.note(text_of(file.string(),
                          " changed during the run, which reads frozen weights from it: results since the change may "
                          "be wrong; run again from an unchanged copy"));
}

std::int64_t bytes_of_saved_model(ModelShape shape, const std::filesystem::path& source, const Options& options) {
  const DType accumulator = accumulator_of(options.dtype);
  const bool adapted = shape.trained.added.exist();
  shape.stored_dtype = adapted ? accumulator : stored_dtype(source).value_or(shape.stored_dtype);
  constexpr std::int64_t kParts = 3;  // masters and both moments
  const DType weights = saved_dtype(options.save_dtype, shape);
  const std::int64_t trained = LocalShape(shape).parameters(Parameters::trained);
  return (adapted ? trained : shape.parameters()) * bytes_of(weights) + trained * kParts * bytes_of(accumulator);
}

RunState continue_trained_model(const std::filesystem::path& directory, ModelState& model, AdamW& optimizer,
                                const std::function<void()>& between) {
  Device& device = model.decoder.device();
  const at::Tensor masters = optimizer.masters(), first = optimizer.exp_avg(), second = optimizer.exp_avg_sq();
  const at::Tensor read[] = {device.to_host(masters), device.to_host(first), device.to_host(second)};  // with padding
  const AdamW::Range own = optimizer.own();
  const std::int64_t bytes = bytes_of(accumulator_of(model.dtype));
  const auto take = [&](std::size_t part, const Parameter& whole, const std::byte* values) {
    if (between) between();
    if (const Parameter* const here = model.table.find(whole.name))
      take_values(*here, kept_within(model.table.kept(*here), own), values, bytes,
                  static_cast<std::byte*>(host_bytes(read[part])));
  };
  RunState former = load_run_state(directory, fingerprint_of(model.shape),
                                   ParameterTable(model.shape, Parameters::trained), accumulator_of(model.dtype), take);
  device.to_device(read[0], masters);
  device.to_device(read[1], first);
  device.to_device(read[2], second);
  optimizer.set_steps_done(former.step);
  optimizer.masters_changed();
  return former;
}

}  // namespace espalier
