// On-policy distillation: a token's advantage is lessened by --opd-kl-coef times old - teacher, the sampled reverse KL
// to a teacher, which --opd-kl-clip bounds from above. docs/objectives.md (17c); slime, miles
// (apply_opd_kl_to_advantages) and tinker's cookbook have the same rule.
#include <algorithm>

#include "espalier/objective/token_rules.h"

namespace espalier {

double teacher_rule(const Options& options, const SequenceConstants&, TokenPart& part) {
  PolicyToken& token = part.token;
  const double reverse_kl = token.old_logprob - token.rollout->teacher_logprobs[token.position];
  token.advantage -= options.opd_kl_coef * std::min(reverse_kl, options.opd_kl_clip);
  return reverse_kl;
}

}  // namespace espalier
