// What the equivalence tests go through: variants of families beside the rows of the table, and losses.
#pragma once

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
                                            "llama-bias-window-sinks"};

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
