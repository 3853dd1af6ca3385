#include "espalier/mixers/delta_rule/shape.h"

#include "espalier/base/error.h"
#include "espalier/shape/layer_shape.h"
#include "espalier/shape/layer_types.h"

namespace espalier {

PartParameters DeltaRule::parameters(std::int64_t hidden) const {
  const RecurrenceShape& s = shape;
  const Side M{hidden}, value{s.value_width(), Cut::tp}, heads{s.value_heads, Cut::tp};
  const auto K = static_cast<std::int32_t>(s.key_heads * s.key_dim), V = static_cast<std::int32_t>(s.value_width());
  const Side channels{s.channels(), Cut::tp, {K, K, V}};
  ProductShape columns{ProductRows::all};
  if (s.by_key_head)
    columns.parts = {{"linear_attn.in_proj_qkvz", {s.channels() + s.value_width(), Cut::tp}, M},
                     {"linear_attn.in_proj_ba", {2 * s.value_heads, Cut::tp}, M}};
  else
    columns.parts = {{"linear_attn.in_proj_qkv", channels, M},
                     {"linear_attn.in_proj_z", value, M},
                     {"linear_attn.in_proj_b", heads, M},
                     {"linear_attn.in_proj_a", heads, M}};
  PartParameters p;
  p.add({std::move(columns)});
  p.add({.parts = {{"linear_attn.conv1d.weight", {channels, {1}, {s.kernel}}}}});
  p.add(TensorRow{});
  p.add({.parts = {{"linear_attn.A_log", {heads}}}});
  p.add({.parts = {{"linear_attn.dt_bias", {heads}}}});
  p.add(TensorRow{});
  p.add({.parts = {{"linear_attn.norm.weight", {{s.value_dim}}}}, .of_heads = true});
  p.add({{ProductRows::continuing, {{"linear_attn.out_proj", M, value}}}});
  return p;
}

std::shared_ptr<const Mixer> DeltaRule::part(std::int64_t ranks) const {
  return std::make_shared<const DeltaRule>(part_of_shape(ranks));
}

namespace {

void read(const Members& config, bool by_key_head, std::vector<LayerShape>& layers) {
  RecurrenceShape s;
  s.by_key_head = by_key_head;
  s.key_heads = config.integer("linear_num_key_heads", 1, kMostSize, 16);
  s.value_heads = config.integer("linear_num_value_heads", 1, kMostSize, 32);
  s.key_dim = config.integer("linear_key_head_dim", 1, kMostSize, 128);
  s.value_dim = config.integer("linear_value_head_dim", 1, kMostSize, 128);
  s.kernel = config.integer("linear_conv_kernel_dim", 1, kMostKernel, 4);
  if (s.value_heads % s.key_heads != 0)
    config.fail("linear_num_value_heads", text_of("a multiple of linear_num_key_heads = ", s.key_heads));
  const std::int64_t interval = config.integer("full_attention_interval", 1, kMostSize, 4);
  set_mixers(config, {"full_attention", "linear_attention"}, std::make_shared<const DeltaRule>(s), layers,
             [&](std::int64_t layer) { return (layer + 1) % interval != 0; });
}

}  // namespace

void read_delta_rule(const Members& config, std::vector<LayerShape>& layers) { read(config, false, layers); }
void read_delta_rule_by_key_head(const Members& config, std::vector<LayerShape>& layers) { read(config, true, layers); }

}  // namespace espalier
