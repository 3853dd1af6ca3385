// The rows of token_rules.def without their functions (objective/token_rules.h).
#pragma once

#include <span>

#include "espalier/options/options.h"

namespace espalier {

enum class RuleSees { token, sequence, sequence_without_old };
enum class RuleRatio { any, old };
enum class RuleChanges { factor, advantage };

struct TokenRuleRow {
  const char* name;
  const char* option;
  bool (*holds)(const Options& options);
  RuleSees sees;
  RuleRatio ratio;
  RuleChanges changes;
  const char* metric;

  bool reports() const { return *metric != '\0'; }
};

inline constexpr std::size_t kTokenRules = 0
#define ESPALIER_TOKEN_RULE(name, option, condition, sees, ratio, changes, metric) +1
#include "espalier/options/token_rules.def"
    ;
std::span<const TokenRuleRow, kTokenRules> token_rule_rows();

// True if a rule that holds gives tokens advantages, so that records need no reward.
bool rules_give_advantages(const Options& options);

}  // namespace espalier
