#include "espalier/state/model_state.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/base/instruction_set.h"
#include "espalier/base/quantised_rows.h"
#include "espalier/base/random.h"
#include "espalier/checkpoint/added_values.h"
#include "espalier/checkpoint/convert.h"
#include "espalier/checkpoint/model_directory.h"
#include "espalier/config/model_config.h"
#include "espalier/device/cuda_library.h"
#include "espalier/device/host_values.h"
#include "espalier/device/scalar_type.h"
#include "espalier/state/layer_notes.h"

namespace espalier {
namespace {

bool is_norm(const std::string& name) { return name.find("norm") != std::string::npos; }
bool is_scale(const std::string& name) { return name.ends_with("scale"); }
bool is_bias(const std::string& name) { return name.ends_with(".bias"); }

// Draws the values of a parameter, in order.
class StartValues {
 public:
  StartValues(const Parameter& whole, double deviation, Random random)
      : kind_(kind_of(whole)),
        width_(kind_ == Kind::uniform ? 1 / std::sqrt(static_cast<double>(whole.shape[1])) : deviation),
        random_(random) {}

  // The next numbers, in their order. Fused products in one instruction give the same ones, in a fraction of the time.
  void next(std::span<double> out) {
    static const bool in_one = processor_fuses();
    in_one ? draw_in_one(out) : draw(out);
  }

 private:
  ESPALIER_FUSING void draw_in_one(std::span<double> out) { draw(out); }
  void draw(std::span<double> out) {
    switch (kind_) {
      case Kind::one:
        std::ranges::fill(out, 1.0);
        return;
      case Kind::zero:
        std::ranges::fill(out, 0.0);
        return;
      case Kind::uniform:
        for (double& value : out) value = random_.uniform(-width_, width_);
        return;
      case Kind::normal:
        for (double& value : out) value = width_ * random_.normal();
    }
  }

  enum class Kind { one, zero, uniform, normal };
  static Kind kind_of(const Parameter& p) {
    if (p.start != Start::own) return p.start == Start::zero ? Kind::zero : Kind::uniform;
    return is_norm(p.name) || is_scale(p.name) ? Kind::one : is_bias(p.name) ? Kind::zero : Kind::normal;
  }
  Kind kind_;
  double width_;
  Random random_;
};

// Overwrites what is kept here of a whole parameter, `flat` in the host's memory.
void fill(const Parameter& whole, const Parameter& here, const Kept& kept, StartValues start, const at::Tensor& flat) {
  const std::vector<ShardRun> runs = runs_of(here, kept);
  auto run = runs.begin();
  std::vector<double> values;
  for (std::int64_t begin = 0; begin < whole.count; begin += static_cast<std::int64_t>(values.size())) {
    values.resize(static_cast<std::size_t>(std::min<std::int64_t>(1 << 16, whole.count - begin)));
    start.next(values);
    const std::int64_t end = begin + static_cast<std::int64_t>(values.size());
    for (; run != runs.end() && run->whole < end; ++run) {
      const std::int64_t first = std::max(begin, run->whole), last = std::min(end, run->whole + run->count);
      flat.narrow(0, run->local + first - run->whole, last - first)
          .copy_(at::from_blob(values.data() + (first - begin), {last - first}, at::kDouble));
      if (run->whole + run->count > end) break;  // goes on in the next piece
    }
  }
}

// The same of a matrix in few bits: of the drawn numbers in bfloat16.
void fill_quantised(const quantised::Form& form, const Parameter& whole, const Parameter& here, StartValues start,
                    const at::Tensor& bytes) {
  std::vector<double> values(static_cast<std::size_t>(whole.shape[1]));
  const auto row = [&](std::int64_t, float* out) {
    start.next(values);
    std::ranges::transform(values, out, [](double x) { return static_cast<float>(bfloat16(static_cast<float>(x))); });
  };
  write_quantised(*quantised::rows_of(form.kind).quantise(form, whole.shape[0], whole.shape[1], row), here,
                  host_bytes(bytes));
}

ModelViews weight_views(ModelState& state, const LocalShape& shape) {
  const auto in_files = [&state](const std::string& name) { return state.mapped->values(name); };
  const std::array buffers{FlatParameters{state.table, state.weights, state.rooms},
                           FlatParameters{state.held_table, state.held_weights, state.held_rooms},
                           FlatParameters{state.narrow_table, state.narrow_weights, {}},
                           FlatParameters{state.quantised_table, state.quantised_weights, {}},
                           FlatParameters{state.mapped_table, {}, {}, in_files}};
  ModelViews views = view_model(buffers, shape);
  std::int64_t router = 0;
  for (LayerViews& layer : views.layers)
    if (state.corrections_LE.defined() && layer.router.weight.defined())
      layer.correction_bias_E = state.corrections_LE.select(0, router++);
  return views;
}

// Undefined where weights serve as they are.
at::Tensor room_for_corrections(const LocalShape& shape, DType dtype, Device& device) {
  const at::ScalarType accumulator = accumulator_type(scalar_type(dtype));
  const std::int64_t routers = shape.own().expert_layers();
  if (!shape.whole().router.correction_bias || routers == 0 || accumulator == scalar_type(dtype)) return {};
  const at::Tensor out = device.allocate({routers, shape.own().experts}, accumulator);
  device.operations().zero(out);
  return out;
}

void load_corrections(const ModelState& state, const std::filesystem::path& directory) {
  if (!state.corrections_LE.defined()) return;
  const StoredTensors stored(directory);
  const LocalShape& local = state.decoder.local();
  const at::Tensor host = at::empty(state.corrections_LE.sizes(), state.corrections_LE.scalar_type());
  float* values = host_values<float>(host).data();
  for (std::int64_t layer = local.layers().begin; layer < local.layers().end; ++layer) {
    if (!state.shape.has_experts(layer)) continue;
    const SafetensorsEntry& entry = stored.at(layer_prefix(layer) + state.shape.names.correction_bias);
    convert_values(entry.type, entry.data, DType::float32, values, entry.count);
    values += entry.count;
  }
  state.decoder.device().to_device(host, state.corrections_LE);
}

bool has_padding(const ParameterTable& table) {
  const auto padded = [](const Parameter& parameter) { return parameter.shard.padded(); };
  return table.sharded() || std::ranges::any_of(table.parameters(), padded);
}

// Host memory for the weights of one table, with their padding.
at::Tensor room_for_weights(const ModelState& state, const ParameterTable& table, const at::Tensor& weights) {
  Device& device = state.decoder.device();
  return has_padding(table) ? device.to_host(weights) : device.host_room(weights);
}

constexpr std::uint64_t kAddedStream = std::uint64_t{1} << 40;  // beyond a model's own parameters
Random added_numbers(std::uint64_t seed) { return Random(seed).fork(kAddedStream); }

// Overwrites what is kept here of a whole parameter's values.
void take(const std::vector<std::byte>& values, const Parameter& here, const Kept& kept, DType dtype,
          const at::Tensor& flat) {
  const std::int64_t bytes = bytes_of(dtype);
  for (const ShardRun& run : runs_of(here, kept))
    convert_values(tensor_type_of(dtype), values.data() + run.whole * bytes, dtype,
                   static_cast<std::byte*>(host_bytes(flat)) + run.local * bytes, run.count);
}

// Start values of added rows, or values of a directory, which also take the place of the model's. `between`: before
// each parameter.
void fill_added(const ModelState& state, const AdditionChoice& choice, const at::Tensor& host, const at::Tensor& held,
                const std::function<void()>& between = {}) {
  if (!choice.exist()) return;
  if (!choice.directory.empty()) {
    ModelShape base = state.shape;
    base.trained = {};
    const auto stored = open_added_values(choice.directory, base);
    const auto of = [&](const ParameterTable& table, const at::Tensor& flat) {
      for (const Parameter& p : table.parameters()) {
        if (!stored->has(p.name)) continue;
        if (between) between();
        take(stored->values(p.name, state.dtype), p, table.kept(p), state.dtype, flat);
      }
    };
    of(state.table, host);
    if (held.defined()) of(state.held_table, held);
    return;
  }
  std::uint64_t stream = 0;
  const ParameterTable all(state.shape);
  for (const Parameter& whole : all.parameters()) {
    if (!whole.added) continue;
    const Random own = added_numbers(choice.seed).fork(stream++);
    const Parameter* const here = state.table.find(whole.name);
    if (here == nullptr) continue;
    if (between) between();
    Parameter drawn = whole;
    if (choice.draws_all && whole.start == Start::zero) drawn.start = Start::uniform;
    fill(whole, *here, state.table.kept(*here), {drawn, state.shape.initializer_range, own}, host);
  }
}

// A critic's head that is not stored is drawn from `seed`.
void load_weights(ModelState& state, const std::filesystem::path& directory, ValueHead head, std::uint64_t seed,
                  const AdditionChoice& added, Progress& progress) {
  state.source = directory;
  state.shape.stored_dtype = stored_dtype(directory).value_or(state.shape.stored_dtype);
  Device& device = state.decoder.device();
  const at::Tensor host = room_for_weights(state, state.table, state.weights);
  const Parameter* const weight = state.table.find(kValueWeight);  // the last stage of pp has it
  if (head == ValueHead::fresh && weight != nullptr)
    fill(*weight, *weight, state.table.kept(*weight), {*weight, state.shape.initializer_range, Random(seed)}, host);
  const std::int64_t beside = state.table.size() + state.held_table.size();
  const std::string on_own_kernels =
      layers_beside_library(state.shape, opened_gpu().attention, opened_gpu().capability);
  if (!on_own_kernels.empty()) progress.note(on_own_kernels);
  if (!state.row_by_row.empty()) progress.note(state.row_by_row);
  if (const std::int64_t further = further_layer_tensors(directory); further > 0)
    progress.note(
        text_of(directory.string(), ": ", further,
                " tensors of layers that predict further tokens do not run; a saved model holds them as they are"));
  if (!state.shape.tied_head && !state.shape.value_head && config_ties_head(directory))
    progress.note(
        text_of(directory.string(),
                ": lm_head.weight and the embedding differ, although config.json ties them "
                "(tie_word_embeddings): they are two matrices here, as in transformers, and in a saved model"));
  const std::int64_t wide = beside + state.narrow_table.size();
  std::int64_t quantised = 0;
  for (const Parameter& p : state.quantised_table.parameters()) quantised += p.shape[0] * p.shape[1];
  progress.begin("weights", wide + quantised, "parameters");
  load_parameters(
      directory, state.table, state.dtype, host_bytes(host),
      [&](std::int64_t done, std::int64_t) { progress.advance_to(done); }, head);
  at::Tensor held;
  if (state.held_table.size() > 0) {
    held = room_for_weights(state, state.held_table, state.held_weights);
    load_parameters(
        directory, state.held_table, state.dtype, host_bytes(held),
        [&](std::int64_t done, std::int64_t) { progress.advance_to(state.table.size() + done); }, head);
  }
  at::Tensor narrow;
  if (state.narrow_table.size() > 0) {
    narrow = room_for_weights(state, state.narrow_table, state.narrow_weights);
    load_parameters(
        directory, state.narrow_table, DType::bfloat16, host_bytes(narrow),
        [&](std::int64_t done, std::int64_t) { progress.advance_to(beside + done); }, head);
  }
  if (state.quantised_table.size() > 0)
    load_quantised(
        directory, state.quantised_table, state.shape.trained.quantised_form, host_bytes(state.quantised_weights),
        [&](std::int64_t done, std::int64_t) { progress.advance_to(wide + done); }, head);
  load_corrections(state, directory);
  fill_added(state, added, host, held);
  device.to_device(host, state.weights);
  if (held.defined()) device.to_device(held, state.held_weights);
  if (narrow.defined()) device.to_device(narrow, state.narrow_weights);
  progress.end();
}

}  // namespace

LocalShape local_shape(const ModelShape& shape, const Mesh& mesh) { return {shape, mesh.degrees, mesh.place()}; }

ModelState::ModelState(const LocalShape& model_shape, DType model_dtype, Device& device, const Mesh& ranks,
                       std::unique_ptr<const MappedWeights> in_files, const ModelState* beside)
    : mesh(ranks),
      shape(model_shape.whole()),
      dtype(model_dtype),
      row_by_row(layers_without_chunks(shape, dtype, device.operations().without_chunks)),
      table(model_shape, Parameters::trained),
      weights(device.allocate({table.kept_size()}, scalar_type(dtype))),
      rooms(device.allocate({table.units().rooms}, scalar_type(dtype))),
      held_table(model_shape, Parameters::held),
      held_weights(beside ? beside->held_weights : device.allocate({held_table.kept_size()}, scalar_type(dtype))),
      held_rooms(device.allocate({held_table.units().rooms}, scalar_type(dtype))),
      narrow_table(model_shape, Parameters::narrow),
      narrow_weights(beside ? beside->narrow_weights : device.allocate({narrow_table.kept_size()}, at::kBFloat16)),
      mapped_table(model_shape, Parameters::mapped),
      mapped(std::move(in_files)),
      quantised_table(model_shape, Parameters::quantised),
      quantised_weights(beside ? beside->quantised_weights : device.allocate({quantised_table.size()}, at::kByte)),
      corrections_LE(beside ? beside->corrections_LE : room_for_corrections(model_shape, dtype, device)),
      gathered({{table, weights, rooms}, {held_table, held_weights, held_rooms}}, ranks),
      decoder(model_shape, weight_views(*this, model_shape), device, ranks, table.sharded() ? &gathered : nullptr) {
  if (has_padding(table)) device.operations().zero(weights);
  if (beside) return;
  if (has_padding(held_table)) device.operations().zero(held_weights);
  if (has_padding(narrow_table)) device.operations().zero(narrow_weights);
  if (has_padding(quantised_table)) device.operations().zero(quantised_weights);
}

namespace {

// Held matrices stay in bfloat16 where all of them are stored so, and not in float64.
void settle_narrow(ModelShape& shape, const std::filesystem::path& directory, DType dtype,
                   const AdditionChoice& added) {
  if (!shape.trained.narrow || dtype == DType::float64) {
    shape.trained.narrow = false;
    return;
  }
  ModelShape base = shape;
  base.trained = {};
  const StoredTensors stored(directory);
  const auto changes = added.directory.empty() ? nullptr : open_added_values(added.directory, base);
  const ParameterTable table(shape, Parameters::narrow);
  shape.trained.narrow = std::ranges::all_of(table.parameters(), [&](const Parameter& p) {
    return stored.has(p.name) && stored.at(p.name).type == TensorType::BF16 && !(changes && changes->has(p.name));
  });
}

// The model, without the weights that are not in files.
std::unique_ptr<ModelState> made_model(ModelShape shape, const std::filesystem::path& directory, DType dtype,
                                       const Mesh& mesh, const AdditionChoice& added, ValueHead head) {
  settle_narrow(shape, directory, dtype, added);
  require_device_adds(shape, bound_device().in_host_memory());
  std::unique_ptr<const MappedWeights> mapped;
  if (shape.trained.narrow) {
    mapped = std::make_unique<const MappedWeights>(directory, local_shape(shape, mesh), head);
    shape.trained.mapped_parameters = mapped->parameters();
  }
  return std::make_unique<ModelState>(local_shape(shape, mesh), dtype, bound_device(), mesh, std::move(mapped));
}

std::unique_ptr<ModelState> load_with_value_head(const std::filesystem::path& directory, CriticShape model, DType dtype,
                                                 std::uint64_t seed, Progress& progress, const Mesh& mesh,
                                                 const TrainedChoice& train, const char* what) {
  model.shape = train_only(std::move(model.shape), train);
  const ValueHead head = model.head_is_stored ? ValueHead::stored : ValueHead::fresh;
  auto state = made_model(model.shape, directory, dtype, mesh, train.added, head);
  if (!model.head_is_stored && !train.added.value_head)
    progress.note(text_of(directory.string(), " is a language model: ", what));
  load_weights(*state, directory, head, seed, train.added, progress);
  return state;
}

}  // namespace

std::unique_ptr<ModelState> load_model(const std::filesystem::path& directory, DType dtype, Progress& progress,
                                       const Mesh& mesh, const TrainedChoice& train) {
  if (train.scores)
    return load_with_value_head(directory, read_reward_shape(directory), dtype, train.added.seed, progress, mesh, train,
                                "the reward model gets a new head, drawn from --seed");
  auto state = made_model(train_only(read_model_shape(directory), train), directory, dtype, mesh, train.added,
                          ValueHead::stored);
  load_weights(*state, directory, ValueHead::stored, 0, train.added, progress);
  return state;
}

std::unique_ptr<ModelState> load_value_model(const std::filesystem::path& directory, DType dtype, std::uint64_t seed,
                                             Progress& progress, const Mesh& mesh, const TrainedChoice& train) {
  return load_with_value_head(directory, read_critic_shape(directory), dtype, seed, progress, mesh, train,
                              "its critic gets a new value head");
}

namespace {

// The same parameters in the same places.
void require_same_layout(const ParameterTable& a, const ParameterTable& b) {
  ESPALIER_INTERNAL_EQ(a.parameters().size(), b.parameters().size());
  for (std::size_t i = 0; i < a.parameters().size(); ++i) {
    const Parameter &one = a.parameters()[i], &other = b.parameters()[i];
    ESPALIER_INTERNAL(one.name == other.name && one.offset == other.offset && one.count == other.count, one.name,
                      " against ", other.name);
  }
}

std::unique_ptr<ModelState> model_beside(const ModelState& base, const ModelShape& given) {
  ModelShape shape = given;
  ESPALIER_INTERNAL_EQ(base.mesh.world.size(), 1, "additions beside each other");
  std::unique_ptr<const MappedWeights> mapped;
  if (shape.trained.narrow) {
    mapped = std::make_unique<const MappedWeights>(base.source, local_shape(shape, base.mesh), ValueHead::stored);
    shape.trained.mapped_parameters = mapped->parameters();
  }
  auto model = std::make_unique<ModelState>(local_shape(shape, base.mesh), base.dtype, base.decoder.device(), base.mesh,
                                            std::move(mapped), &base);
  require_same_layout(model->held_table, base.held_table);
  require_same_layout(model->narrow_table, base.narrow_table);
  require_same_layout(model->quantised_table, base.quantised_table);
  model->source = base.source;
  return model;
}

}  // namespace

std::unique_ptr<ModelState> adapted_model(const ModelState& base, const AdditionChoice& added,
                                          const std::function<void()>& between) {
  TrainedChoice choice("all", added);
  choice.narrow = base.shape.trained.narrow;
  choice.held = base.shape.trained.quantised_form.kind;
  ModelShape shape = base.shape;
  shape.trained = {};
  auto model = model_beside(base, train_only(std::move(shape), choice));
  const at::Tensor host = room_for_weights(*model, model->table, model->weights);
  fill_added(*model, added, host, {}, between);
  base.decoder.device().to_device(host, model->weights);
  return model;
}

std::unique_ptr<ModelState> snapshot_of(const ModelState& model) {
  auto copy = model_beside(model, model.shape);
  model.decoder.device().operations().convert(model.weights, copy->weights);
  copy->updates = model.updates;
  return copy;
}

std::unique_ptr<Decoder> decoder_without_additions(const ModelState& model) {
  return std::make_unique<Decoder>(model.decoder.local(), without_additions(model.decoder.weights()),
                                   model.decoder.device(), model.mesh, model.decoder.gathering());
}

std::unique_ptr<ModelState> random_model(const ModelShape& given, DType dtype, std::uint64_t seed, const Mesh& mesh) {
  ModelShape shape = given;
  shape.trained.narrow = shape.trained.narrow && dtype != DType::float64;
  const quantised::Kind kind = shape.trained.quantised_form.kind;
  if (kind != quantised::Kind::none && quantised::rows_of(kind).quantises)
    shape.trained.quantised_form = quantised::rows_of(kind).usual;
  auto state = std::make_unique<ModelState>(local_shape(shape, mesh), dtype, bound_device(), mesh);
  const Random random(seed);
  const at::Tensor host = room_for_weights(*state, state->table, state->weights),
                   held = room_for_weights(*state, state->held_table, state->held_weights),
                   narrow = room_for_weights(*state, state->narrow_table, state->narrow_weights);
  const Random added = added_numbers(seed);  // the model's own numbers are the same without additions
  std::uint64_t stream = 0, added_stream = 0;
  const ParameterTable all(shape);
  std::vector<Random> of_parameter;
  for (const Parameter& whole : all.parameters())
    of_parameter.push_back(whole.added ? added.fork(added_stream++) : random.fork(stream++));
  const auto draw = [&](std::size_t i) {
    const Parameter& whole = all.parameters()[i];
    const StartValues start(whole, shape.initializer_range, of_parameter[i]);
    if (const Parameter* const here = state->table.find(whole.name))
      fill(whole, *here, state->table.kept(*here), start, host);
    if (const Parameter* const here = state->held_table.find(whole.name))
      fill(whole, *here, state->held_table.kept(*here), start, held);
    if (const Parameter* const here = state->narrow_table.find(whole.name))
      fill(whole, *here, state->narrow_table.kept(*here), start, narrow);
    if (const Parameter* const here = state->quantised_table.find(whole.name))
      fill_quantised(shape.trained.quantised_form, whole, *here, start, state->quantised_weights);
  };
  at::parallel_for(0, static_cast<std::int64_t>(of_parameter.size()), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) draw(static_cast<std::size_t>(i));
  });
  state->decoder.device().to_device(host, state->weights);
  state->decoder.device().to_device(held, state->held_weights);
  state->decoder.device().to_device(narrow, state->narrow_weights);
  return state;
}

}  // namespace espalier
