#include "espalier/model/decoder.h"

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
  if (positions <= rotary_.positions()) return;
  const auto make = [&](const Rope& rope, std::int64_t rotary_dim) {
    return make_rotary_tables(rope, rotary_dim, positions, accumulator_type(dtype()));
  };
  const auto adopt = [&](const RotaryTables& made) {
    return RotaryTables{device_.adopt(made.cos), device_.adopt(made.sin)};
  };
  const auto tables = [&](const Rope& rope, std::int64_t rotary_dim) { return adopt(make(rope, rotary_dim)); };
  rotary_ = tables(shape_.rope(), shape_.rotary_dim());
  if (const AttentionShape& attention = shape_.attention; attention.query_growth > 0)
    query_rotary_ = adopt(
        growing_tables(make(shape_.rope(), shape_.rotary_dim()), attention.query_growth, attention.growth_length));
  if (shape_.has_window_rope) window_rotary_ = tables(shape_.window_rope, shape_.rotary_dim());
  if (!shape_.unrotated_layer.empty()) no_rotary_ = tables(Rope{}, 0);
}

void Decoder::share_positions(const Decoder& other) {
  rotary_ = other.rotary_, window_rotary_ = other.window_rotary_, no_rotary_ = other.no_rotary_;
  query_rotary_ = other.query_rotary_;
}

const RotaryTables& Decoder::rotary(std::int64_t layer) const {
  if (!shape_.rotates(layer)) return no_rotary_;
  return shape_.has_window_rope && shape_.is_window_layer(layer) ? window_rotary_ : rotary_;
}

const RotaryTables& Decoder::query_rotary(std::int64_t layer) const {
  return shape_.attention.query_growth > 0 ? query_rotary_ : rotary(layer);
}

// As transformers rounds it: to the dtype of the embedding.
double Decoder::embedding_factor() const {
  const double factor = shape_.scales.embedding;
  return dtype() == at::kBFloat16 ? static_cast<double>(static_cast<float>(bfloat16(static_cast<float>(factor))))
                                  : factor;
}

BlockShape Decoder::block() const {
  return {shape_, element_bytes(dtype()), device_.operations().rounds_weight_gradients(dtype())};
}

bool Decoder::last_block_is_narrow(const ModelInput& input) const {
  return local_.is_last_stage() && (!input.all_rows_choose || !shape_.has_experts(shape_.layers - 1));
}

LayerContext Decoder::layer(const DecoderRun& run, std::int64_t layer, const RouterPenalties* penalties) const {
  const bool narrow = layer + 1 == shape_.layers && last_block_is_narrow(run.input);
  return {shape_,        weights_.layers[static_cast<std::size_t>(layer)],
          rotary(layer), query_rotary(layer),
          run.input,     run.kv,
          layer,         narrow,
          run.arena,     run.timer,
          mesh_,         penalties};
}

}  // namespace espalier
