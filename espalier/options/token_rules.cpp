#include "espalier/options/token_rules.h"

#include <algorithm>
#include <cmath>

namespace espalier {

std::span<const TokenRuleRow, kTokenRules> token_rule_rows() {
  static constexpr TokenRuleRow kRows[] = {
#define ESPALIER_TOKEN_RULE(name, option, condition, sees, ratio, changes, metric) \
  {#name,          option,           [](const Options& options) { return bool(condition); },               \
   RuleSees::sees, RuleRatio::ratio, RuleChanges::changes,                         \
   metric},
#include "espalier/options/token_rules.def"
  };
  return kRows;
}

bool rules_give_advantages(const Options& options) {
  return std::ranges::any_of(token_rule_rows(), [&](const TokenRuleRow& rule) {
    return rule.changes == RuleChanges::advantage && rule.holds(options);
  });
}

}  // namespace espalier
