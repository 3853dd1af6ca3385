#include "espalier/objective/token_rules.h"

#include <algorithm>

namespace espalier {
namespace {

using Rule = double (*)(const Options& options, const SequenceConstants& sequence, TokenPart& part);
constexpr Rule kRules[] = {
#define ESPALIER_TOKEN_RULE(name, option, condition, sees, ratio, changes, metric) name##_rule,
#include "espalier/options/token_rules.def"
};

}  // namespace

TokenRules::TokenRules(const Options& options) : options_(options) {
  for (std::size_t rule = 0; rule < kTokenRules; ++rule)
    if (token_rule_rows()[rule].holds(options)) held_.push_back(rule);
}

void TokenRules::apply(const SequenceConstants& sequence, TokenPart& part, Reports* reports) const {
  for (const std::size_t rule : held_) {
    const double number = kRules[rule](options_, sequence, part);
    if (reports) (*reports)[rule] = number;
    if (part.factor == 0) return;
  }
}

bool TokenRules::holds(std::size_t rule) const { return std::ranges::find(held_, rule) != held_.end(); }

double off_policy_rule(const Options&, const SequenceConstants& sequence, TokenPart& part) {
  if (sequence.off_policy && part.token.advantage < 0) part.factor = 0;
  return part.factor;
}

}  // namespace espalier
