// Faults of histories: the prompt of a turn does not continue the tokens of the turn before it.
#pragma once

#include <span>
#include <vector>

#include "espalier/doctor/finding.h"
#include "espalier/rollout/rollout.h"
#include "espalier/services/tokenizer.h"

namespace espalier {

// retokenized_turns where the history has the same text in other tokens, changed_history where its text differs.
// Without a tokenizer (null), a history that continues alike after a few other tokens counts as tokenized again.
std::vector<Finding> history_faults(std::span<const Rollout> rollouts, Tokenizer* tokenizer);

}  // namespace espalier
