#include "espalier/mixers/mamba2/shape.h"

#include "espalier/base/error.h"
#include "espalier/shape/half_blocks.h"
#include "espalier/shape/layer_shape.h"

namespace espalier {

PartParameters Mamba2::parameters(std::int64_t hidden) const {
  const RecurrenceShape& s = shape;
  const auto V = static_cast<std::int32_t>(s.value_width()), H = static_cast<std::int32_t>(s.value_heads),
             K = static_cast<std::int32_t>(s.key_heads * s.key_dim);
  const Side M{hidden}, value{V, Cut::tp}, heads{H, Cut::tp}, channels{s.channels(), Cut::tp, {V, K, K}};
  TensorRow bias;
  if (s.conv_bias) bias.parts = {{"mamba.conv1d.bias", {channels}}};
  PartParameters p;
  p.add({{ProductRows::all, {{"mamba.in_proj", {s.projected(), Cut::tp, {V, V, K, K, H}}, M}}}});
  p.add({.parts = {{"mamba.conv1d.weight", {channels, {1}, {s.kernel}}}}});
  p.add(std::move(bias));
  p.add({.parts = {{"mamba.A_log", {heads}}}});
  p.add({.parts = {{"mamba.dt_bias", {heads}}}});
  p.add({.parts = {{"mamba.D", {heads}}}});
  p.add({.parts = {{"mamba.norm.weight", {value}}}, .of_heads = true});
  p.add({{ProductRows::continuing, {{"mamba.out_proj", M, value}}}});
  return p;
}

std::shared_ptr<const Mixer> Mamba2::part(std::int64_t ranks) const {
  return std::make_shared<const Mamba2>(part_of_shape(ranks));
}

namespace {

// The names of a config's members.
struct MemberNames {
  const char *groups, *heads, *state, *kernel, *head, *conv_bias, *projection_bias;
};
constexpr MemberNames kUsualNames{"mamba_n_groups", "mamba_n_heads",   "mamba_d_state",  "mamba_d_conv",
                                  "mamba_d_head",   "mamba_conv_bias", "mamba_proj_bias"};
constexpr MemberNames kNemotronNames{"n_groups",       "mamba_num_heads", "ssm_state_size", "conv_kernel",
                                     "mamba_head_dim", "use_conv_bias",   "use_bias"};

void read_time_steps(const Members& config, RecurrenceShape& s) {
  if (!config.has("time_step_limit")) return;
  const Json& limit = config.at("time_step_limit");
  const auto infinite = [](const Json& value) { return value == Json({{"__float__", "Infinity"}}); };
  const bool two = limit.is_array() && limit.size() == 2;
  if (!two || !limit[0].is_number() || !(infinite(limit[1]) || limit[1].is_number()))
    config.fail("time_step_limit", "two numbers");
  s.least_step = limit[0].get<double>();
  if (!infinite(limit[1])) s.largest_step = limit[1].get<double>();
}

void read_rest(const Members& config, const MemberNames& names, RecurrenceShape& s) {
  if (s.value_heads % s.key_heads != 0)
    config.fail(names.heads, text_of("a multiple of ", names.groups, " = ", s.key_heads));
  s.conv_bias = config.flag(names.conv_bias, true);
  for (const char* const name : {"mamba_proj_bias", names.projection_bias})
    if (config.flag(name, false)) config.refuse(text_of(name, " = true"), "projections without biases");
}

std::shared_ptr<const Mixer> usual_mixer(const Members& config) {
  const MemberNames& names = kUsualNames;
  RecurrenceShape s;
  s.mamba = true;
  s.key_heads = config.integer(names.groups, 1, kMostSize, 1);
  s.value_heads = config.integer(names.heads, 1, kMostSize, 128);
  s.key_dim = config.integer(names.state, 1, kMostSize, 256);
  s.kernel = config.integer(names.kernel, 1, kMostKernel, 4);
  const std::int64_t width =
      config.integer("mamba_expand", 1, kMostSize, 2) * config.integer("hidden_size", 1, 1 << 20);
  const bool stated = config.has(names.head) && config.at(names.head) != Json("auto");
  s.value_dim = stated ? config.integer(names.head, 1, kMostSize, 1) : width / s.value_heads;
  if (s.value_heads * s.value_dim != width)
    config.fail(names.heads, text_of("heads that are together mamba_expand * hidden_size = ", width, " wide"));
  read_time_steps(config, s);
  read_rest(config, names, s);
  return std::make_shared<const Mamba2>(s);
}

const Json* list_of_layers(const Members& config, const char* member, std::size_t layers, bool each) {
  if (!config.has(member)) return nullptr;
  const Json& stated = config.at(member);
  if (!stated.is_array() || (each && stated.size() != layers))
    config.fail(member, text_of("a list of ", layers, " layers"));
  return &stated;
}

}  // namespace

void read_bamba(const Members& config, std::vector<LayerShape>& layers) {
  constexpr const char* kMember = "attn_layer_indices";
  const std::shared_ptr<const Mixer> mamba = usual_mixer(config);
  std::vector<std::uint8_t> attends(layers.size(), 0);
  if (const Json* const stated = list_of_layers(config, kMember, layers.size(), false))
    for (const Json& entry : *stated) {
      if (!entry.is_number_integer() || entry.get<std::int64_t>() < 0 ||
          entry.get<std::int64_t>() >= static_cast<std::int64_t>(layers.size()))
        config.fail(kMember, text_of("numbers of layers below ", layers.size()));
      attends[entry.get<std::size_t>()] = 1;
    }
  for (std::size_t i = 0; i < layers.size(); ++i)
    if (attends[i] == 0) layers[i].mixer = mamba;
}

void read_granite_hybrid(const Members& config, std::vector<LayerShape>& layers) {
  const std::shared_ptr<const Mixer> mamba = usual_mixer(config);
  const Json* const stated = list_of_layers(config, "layer_types", layers.size(), true);
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const Json entry = stated ? (*stated)[i] : Json("mamba");
    const bool attends = entry == "attention" || entry == "full_attention";
    if (!attends && entry != "mamba" && entry != "linear_attention")
      config.refuse("layer type " + shown(entry), "layers of mamba and attention");
    if (!attends) layers[i].mixer = mamba;
  }
}

void read_nemotron_h(const Members& config, std::vector<LayerShape>& layers) {
  constexpr std::int64_t kHead = 64;
  const MemberNames& names = kNemotronNames;
  RecurrenceShape s;
  s.mamba = true;
  s.key_heads = config.integer(names.groups, 1, kMostSize, 8);
  s.value_heads = config.integer(names.heads, 1, kMostSize, 128);
  s.key_dim = config.integer(names.state, 1, kMostSize, 128);
  s.kernel = config.integer(names.kernel, 1, kMostKernel, 4);
  s.value_dim = config.integer(names.head, 1, kMostSize, kHead);
  // transformers' own code has this limit alone; kernels of others read time_step_limit.
  s.least_step = config.positive("time_step_min", 0.001);
  if (const std::string act = config.text("mamba_hidden_act", "silu"); act != "silu")
    config.refuse("mamba_hidden_act '" + act + "'", "mamba_hidden_act silu");
  read_rest(config, names, s);
  const auto mamba = std::make_shared<const Mamba2>(s);
  const std::vector<HalfBlocks> blocks = read_half_blocks(config);
  for (std::size_t i = 0; i < layers.size(); ++i)
    if (blocks[i].recurrent) layers[i].mixer = mamba;
}

}  // namespace espalier
