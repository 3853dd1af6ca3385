// Factors of the equivalence tests: variants of families beside the rows of the table, and losses.
#pragma once

#include <functional>
#include <map>
#include <span>

#include "espalier/base/error.h"
#include "espalier/mixers/attention/shape.h"
#include "espalier/shape/path_leaves.h"
#include "tests/equivalence/fixture.h"

namespace espalier::testing {

inline constexpr const char* kVariants[] = {"llama",
                                            "llama-bias",
                                            "qwen2",
                                            "qwen3",
                                            "qwen3-moe",
                                            "qwen3-moe-plain",
                                            "qwen3-moe-sparse",
                                            "qwen3-moe-late",
                                            "qwen3-moe-128",
                                            "qwen3-moe-one",
                                            "qwen3-moe-all",
                                            "qwen3-moe-many",
                                            "qwen3-moe-ties",
                                            "qwen3-window",
                                            "llama-windows",
                                            "qwen3-moe-window",
                                            "qwen3-next",
                                            "qwen3-next-plain",
                                            "qwen3-next-last",
                                            "qwen3-next-all",
                                            "qwen3-next-moe",
                                            "qwen3-sinks",
                                            "llama-bias-window-sinks",
                                            "gemma4-reads",
                                            "gemma4-moe"};

// The variants, and the rows of the table.
inline std::vector<std::string> all_families() {
  std::vector<std::string> names(std::begin(kVariants), std::end(kVariants));
  for (const std::string& row : families_of_table()) names.push_back(row);
  return names;
}

// The properties of a family that a plan, a path and a state of an item meet: the kinds of its layers' parts. Sizes,
// norms of heads, biases and rotations are a layer's own, and every plan runs them alike.
inline std::string parts_of(const std::string& family) {
  const ModelShape shape = tiny_shape(family);
  std::string out = text_of(shape.tied_head, shape.pad_token >= 0, may_carry_latents(shape),
                            shape.layer_inputs.width > 0, shape.shared_expert.apart);
  for (const LayerShape& layer : shape.layer) {
    const auto* const attention = dynamic_cast<const Attention*>(layer.mixer.get());
    out += text_of(" ", static_cast<int>(layer.mixer->kind()), layer.mixer->window() > 0,
                   attention != nullptr && attention->shape.sinks, layer.mixer->source(), layer.is_read_later,
                   layer.output_scale.is_used(), static_cast<int>(layer.mlp), layer.has_norms_before(),
                   layer.has_norms_after() || shape.scales.residual != 1);
  }
  return out;
}

// Families that are alike in parts_of and in `also`, at most `most` in a group.
inline std::vector<std::vector<std::string>> groups_of_families(
    std::size_t most, const std::function<std::string(const std::string&)>& also = {}) {
  std::map<std::string, std::vector<std::string>> alike;
  for (const std::string& family : all_families())
    alike[parts_of(family) + (also ? also(family) : "")].push_back(family);
  std::vector<std::vector<std::string>> out;
  for (const auto& [parts, families] : alike)
    for (std::size_t first = 0; first < families.size(); first += most)
      out.emplace_back(families.begin() + static_cast<std::ptrdiff_t>(first),
                       families.begin() + static_cast<std::ptrdiff_t>(std::min(families.size(), first + most)));
  return out;
}

struct Loss {
  const char* policy_loss;
  const char* loss_agg_mode;
  const char* rollout_is;
  double kl, entropy;
};

inline constexpr Loss kLosses[] = {{"vanilla", "token-mean", "token", 0.1, 0.01},
                                   {"vanilla", "seq-mean-token-sum-norm", "sequence", 0, 0},
                                   {"gspo", "", "none", 0.05, 0.02},
                                   {"gspo", "token-mean", "sequence", 0.05, 0.02},
                                   {"cispo", "seq-mean-token-sum", "token", 0, 0.01},
                                   {"sapo", "", "none", 0.1, 0},
                                   {"gpg", "token-sum", "none", 0, 0},
                                   {"reinforce", "seq-mean-token-mean", "sequence", 0.01, 0}};

inline void set_loss(Case& c, const Loss& loss) {
  c.options.policy_loss = loss.policy_loss;
  c.options.loss_agg_mode = loss.loss_agg_mode;
  c.options.rollout_is = loss.rollout_is;
  c.options.kl_loss_coef = loss.kl;
  c.options.entropy_coeff = loss.entropy;
}

}  // namespace espalier::testing
