#include "espalier/mixers/short_convolution/shape.h"

#include <algorithm>
#include <map>

#include "espalier/mixers/attention/shape.h"
#include "espalier/parallel/degrees.h"
#include "espalier/shape/fingerprint_words.h"
#include "espalier/shape/layer_types.h"

namespace espalier {

PartParameters ShortConvolution::parameters(std::int64_t hidden) const {
  const ShortConvolutionShape& s = shape;
  const auto C = static_cast<std::int32_t>(s.channels);
  const Side M{hidden}, channels{s.channels, Cut::tp};
  TensorRow bias;
  if (s.bias) bias.parts = {{"conv.conv.bias", {channels}}};
  PartParameters p;
  p.add({{ProductRows::all, {{"conv.in_proj", {s.projected(), Cut::tp, {C, C, C}}, M, s.bias}}}});
  p.add({.parts = {{"conv.conv.weight", {channels, {1}, {s.kernel}}}}});
  p.add(std::move(bias));
  p.add({{ProductRows::continuing, {{"conv.out_proj", M, channels, s.bias}}}});
  return p;
}

std::shared_ptr<const Mixer> ShortConvolution::part(std::int64_t ranks) const {
  ShortConvolutionShape own = shape;
  own.channels /= ranks;
  return std::make_shared<const ShortConvolution>(own);
}

void ShortConvolution::require(const Degrees& d) const {
  if (shape.channels % d.tp != 0)
    throw OptionError(
        {"--tp", text_of("a divisor of the ", shape.channels, " channels of short convolutions"), text_of(d.tp), ""});
}

Mixer::Refusal ShortConvolution::refused_on_gpu(std::int64_t) const {
  if (shape.kernel <= kLongestGpuShortConvolution) return {};
  return {text_of("short convolutions of at most ", kLongestGpuShortConvolution, " rows"), text_of(shape.kernel)};
}

std::string ShortConvolution::fingerprint() const {
  const auto& [channels, kernel, bias] = shape;
  FingerprintWords words{std::string(name_of(kind()))};
  words.number("channels", channels);
  words.number("kernel", kernel);
  words.flag("bias", bias);
  return std::move(words).text();
}

namespace {

constexpr std::int64_t kMostKernel = 32, kMostWidth = std::int64_t{1} << 24;

// The width of the MLPs, as the configuration class adjusts the stated one.
std::int64_t mlp_width(const Members& config) {
  const char* const member = config.has("block_ff_dim") ? "block_ff_dim" : "intermediate_size";
  std::int64_t width = config.integer(member, 1, kMostWidth, 12288);
  if (!config.flag("block_auto_adjust_ff_dim", true)) return width;
  width = 2 * width / 3;
  if (!config.is_null("block_ffn_dim_multiplier")) {
    const std::int64_t multiple = config.integer("block_multiple_of", 1, kMostWidth, 256);
    const double times = config.positive("block_ffn_dim_multiplier", 1) * static_cast<double>(width);
    if (times > kMostWidth) config.fail("block_ffn_dim_multiplier", text_of("MLPs at most ", kMostWidth, " wide"));
    width = (static_cast<std::int64_t>(times) + multiple - 1) / multiple * multiple;
  }
  if (width < 1) config.fail(member, "a width of which two thirds are left");
  return width;
}

// full_attn_idxs, all layers where it is absent: 1 for layers of attention.
std::vector<std::uint8_t> attending(const Members& config, std::size_t layers) {
  constexpr const char* kMember = "full_attn_idxs";
  std::vector<std::uint8_t> attends(layers, config.has(kMember) ? 0 : 1);
  if (!config.has(kMember)) return attends;
  if (!config.at(kMember).is_array()) config.fail(kMember, "a list of numbers of layers");
  for (const Json& number : config.at(kMember)) {
    if (!number.is_number_integer() || number.get<std::int64_t>() < 0 ||
        number.get<std::int64_t>() >= static_cast<std::int64_t>(layers))
      config.fail(kMember, text_of("numbers of layers below ", layers));
    attends[number.get<std::size_t>()] = 1;
  }
  return attends;
}

}  // namespace

Json usual_members_of_lfm2(const Members& config) {
  Json out = config.all();
  out["intermediate_size"] = mlp_width(config);
  if (!config.has("tie_embedding")) return out;
  const bool tied = config.flag("tie_embedding", true);
  if (tied && !config.flag("tie_word_embeddings", true))
    config.refuse("tie_embedding = true and a head of its own", "tie_embedding that agrees with tie_word_embeddings");
  out["tie_word_embeddings"] = tied;
  return out;
}

void read_lfm2(const Members& config, std::vector<LayerShape>& layers) {
  ShortConvolutionShape s;
  s.channels = config.integer("hidden_size", 1, 1 << 20);
  s.kernel = config.integer("conv_L_cache", 1, kMostKernel, 3);
  if (s.kernel == 1) config.refuse("conv_L_cache = 1", "convolutions of at least two rows");
  s.bias = config.flag("conv_bias", false);
  std::map<std::shared_ptr<const Mixer>, std::shared_ptr<const Mixer>> renamed;  // layers share a mixer as before
  for (LayerShape& layer : layers) {
    std::shared_ptr<const Mixer>& mixer = renamed[layer.mixer];
    if (!mixer) {
      AttentionShape attention = static_cast<const Attention&>(*layer.mixer).shape;
      attention.names = {.output = "self_attn.out_proj",
                         .query_norm = "self_attn.q_layernorm.weight",
                         .key_norm = "self_attn.k_layernorm.weight"};
      mixer = std::make_shared<const Attention>(std::move(attention));
    }
    layer.mixer = mixer;
  }
  const std::vector<std::uint8_t> attends = attending(config, layers.size());
  set_mixers(config, {"full_attention", "conv"}, std::make_shared<const ShortConvolution>(s), layers,
             [&](std::int64_t layer) { return attends[static_cast<std::size_t>(layer)] == 0; });
}

}  // namespace espalier
