#include "espalier/model/decoder.h"

#include <algorithm>
#include <utility>

#include "espalier/device/scalar_type.h"

namespace espalier {

Decoder::Decoder(const LocalShape& shape, ModelViews weights, Device& device, const Mesh& mesh, Guest* gathering)
    : local_(shape),
      shape_(shape.own()),
      weights_(std::move(weights)),
      device_(device),
      mesh_(mesh),
      gathering_(gathering) {
  if (auto* const require = device.operations().require_taken) require(shape_, dtype());
}

void Decoder::reserve_positions(std::int64_t positions) {
  if (positions <= positions_) return;
  positions_ = positions;
  std::vector<std::pair<RotaryShape, RotaryTables>> made;  // layers share equal tables
  const auto tables_of = [&](const RotaryShape& of) {
    const auto found = std::ranges::find(made, of, &std::pair<RotaryShape, RotaryTables>::first);
    if (found != made.end()) return found->second;
    const Rope rope = of.channels > 0 ? of.rope : Rope{};
    RotaryTables tables = make_rotary_tables(rope, of.channels, positions, accumulator_type(dtype()));
    if (of.growth > 0) tables = growing_tables(tables, of.growth, of.growth_length);
    return made.emplace_back(of, RotaryTables{device_.adopt(tables.cos), device_.adopt(tables.sin)}).second;
  };
  rotations_.clear();
  for (const LayerShape& layer : shape_.layer) {
    std::vector<RotaryTables>& of_layer = rotations_.emplace_back();
    for (const RotaryShape& rotation : layer.mixer->rotations()) of_layer.push_back(tables_of(rotation));
  }
}

void Decoder::share_positions(const Decoder& other) {
  positions_ = other.positions_;
  rotations_ = other.rotations_;
}

// As transformers rounds it: to the dtype of the embedding.
double Decoder::embedding_factor() const {
  const double factor = shape_.scales.embedding;
  return dtype() == at::kBFloat16 ? static_cast<double>(static_cast<float>(bfloat16(static_cast<float>(factor))))
                                  : factor;
}

BufferSizes Decoder::sizes() const {
  return {shape_, element_bytes(dtype()), device_.operations().rounds_weight_gradients(dtype())};
}

bool Decoder::last_block_is_narrow(const ModelInput& input) const {
  return local_.is_last_stage() && (!input.all_rows_choose || !shape_.has_experts(shape_.layers() - 1));
}

namespace {

// A layer's columns of the inputs of all layers, or of their gradients.
at::Tensor layer_part(const at::Tensor& inputs_TW, std::int64_t width, std::int64_t layer) {
  return inputs_TW.defined() ? inputs_TW.narrow(1, layer * width, width) : at::Tensor();
}

}  // namespace

LayerContext Decoder::layer(const DecoderRun& run, std::int64_t layer, const RouterPenalties* penalties) const {
  static const std::vector<RotaryTables> none;
  const auto at = static_cast<std::size_t>(layer);
  const bool narrow = layer + 1 == shape_.layers() && last_block_is_narrow(run.input);
  return {shape_,
          shape_.layer[at],
          weights_.layers[at],
          rotations_.empty() ? none : rotations_[at],
          run.input,
          run.kv,
          layer,
          narrow,
          run.arena,
          run.timer,
          mesh_,
          penalties,
          layer_part(run.layer_inputs_TW, shape_.layer_inputs.width, layer),
          layer_part(run.grad_layer_inputs_TW, shape_.layer_inputs.width, layer)};
}

}  // namespace espalier
