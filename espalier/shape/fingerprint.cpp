#include "espalier/shape/fingerprint.h"

#include <utility>

#include "espalier/shape/fingerprint_words.h"

namespace espalier {

void FingerprintWords::add(const Rope& rope, std::int64_t channels) {
  number("rotary", channels);
  if (channels == 0) return;
  const auto& [theta, has_scaling, scaling] = rope;
  number("rope_theta", theta);
  if (!has_scaling) return;
  const auto& [factor, low, high, original, type, attention_factor, beta_fast, beta_slow, truncate, short_factor,
               long_factor, turning] = scaling;
  out_ << " rope_scaling=" << static_cast<int>(type) << "," << factor << "," << low << "," << high << "," << original
       << "," << attention_factor << "," << beta_fast << "," << beta_slow << "," << truncate;
  for (const double one : short_factor) out_ << "," << one;
  if (!long_factor.empty()) out_ << ",long";
  if (turning != 1) out_ << ",turning" << turning;
  for (const double one : long_factor) out_ << "," << one;
}

namespace {

void add(FingerprintWords& words, const Scales& scales) {
  const auto& [embedding, residual, logits, logit_cap] = scales;
  words.unless(1, "embedding_scale", embedding);
  words.unless(1, "residual_scale", residual);
  words.unless(1, "logits_scale", logits);
  words.unless(0, "logit_cap", logit_cap);
}

void add(FingerprintWords& words, const RouterKind& router) {
  const auto& [sigmoid, correction_bias, after_choice, bias, wide, groups, top_groups, scaling, expert_scale] = router;
  for (const auto& [value, name] : {std::pair{sigmoid, "router_sigmoid"},
                                    {correction_bias, "correction_bias"},
                                    {after_choice, "softmax_after_choice"},
                                    {bias, "router_bias"},
                                    {wide, "wide_router"},
                                    {expert_scale, "expert_scale"}})
    words.flag(name, value);
  words.unless(1, "router_groups", groups);
  words.unless(1, "router_top_groups", top_groups);
  words.unless(1, "router_scaling", scaling);
}

void add(FingerprintWords& words, const ActivationRule& activation) {
  const auto& [kind, limit, gated] = activation;
  words.unless(0, "activation", static_cast<int>(kind));
  words.unless(0, "activation_limit", limit);
  words.flag("ungated", !gated);
}

void add(FingerprintWords& words, const SharedExpert& shared) {
  const auto& [inner, gate, apart] = shared;
  words.unless(0, "shared_inner", inner);
  words.flag("shared_gate", gate);
  words.flag("apart_experts", apart);
}

std::string words_of(const LayerShape& layer) {
  const auto& [mixer, mlp, inner, norm_place, output_scale, implied_is_read_later, ignored_trains, ignored_adapted,
               ignored_adapted_alike] = layer;
  FingerprintWords words(mixer->fingerprint());
  words.unless(0, "mlp", static_cast<int>(mlp));
  if (mlp == MlpKind::dense) words.number("inner", inner);
  words.unless(0, "norm_place", static_cast<int>(norm_place));
  words.unless(1, "output_scale", output_scale.value);
  return std::move(words).text();
}

// "0-2,5: " before the words of these layers.
std::string words_of(const std::vector<LayerShape>& layers) {
  std::vector<std::string> distinct, numbers;
  for (std::size_t begin = 0, end = 0; begin < layers.size(); begin = end) {
    const std::string words = words_of(layers[begin]);
    for (end = begin + 1; end < layers.size() && words_of(layers[end]) == words;) ++end;
    const std::string run = std::to_string(begin) + (end > begin + 1 ? "-" + std::to_string(end - 1) : std::string());
    std::size_t i = 0;
    while (i < distinct.size() && distinct[i] != words) ++i;
    if (i == distinct.size()) {
      distinct.push_back(words);
      numbers.push_back(run);
    } else {
      numbers[i] += "," + run;
    }
  }
  std::string out;
  for (std::size_t i = 0; i < distinct.size(); ++i) out += " layers " + numbers[i] + ": " + distinct[i] + ";";
  return out;
}

}  // namespace

std::string fingerprint_of(const ModelShape& shape) {
  const auto& [architecture, hidden, vocabulary, ignored_max_positions, eps, tied_head, pad_token, value_head, mlp_bias,
               ignored_initializer_range, layer, experts, per_token, expert_inner, norm_topk, router, shared_expert,
               expert_bias, norm, activation, scales, layer_inputs, implied_names, implied_beside_vision,
               ignored_image_tokens, ignored_stored_quantised, ignored_stored_dtype, trained] = shape;
  FingerprintWords words(architecture);
  words.number("hidden", hidden);
  words.number("vocabulary", vocabulary);
  words.number("eps", eps);
  words.unless(-1, "pad_token", pad_token);
  for (const auto& [value, name] :
       {std::pair{tied_head, "tied_head"}, {value_head, "value_head"}, {mlp_bias, "mlp_bias"}})
    words.flag(name, value);
  words.unless(0, "norm", static_cast<int>(norm));
  add(words, activation);
  add(words, scales);
  words.unless(0, "layer_inputs", layer_inputs.width);
  if (experts > 0) {
    words.number("experts", experts);
    words.number("per_token", per_token);
    words.number("expert_inner", expert_inner);
    words.number("norm_topk", norm_topk);
    words.flag("expert_bias", expert_bias);
    add(words, router);
    add(words, shared_expert);
  }
  words.text(words_of(layer));
  if (trained.quantised_parameters)
    words.text(std::string(" weights=") + quantised::rows_of(trained.quantised_form.kind).word);
  if (!trained.all()) words.text(std::string(kFingerprintTrain) + trained.words);
  return std::move(words).text();
}

}  // namespace espalier
