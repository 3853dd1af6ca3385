// Rollouts from files, with progress and notes: what most verbs begin with.
#pragma once

#include <string>
#include <vector>

#include "cli/verbs.h"
#include "espalier/rollout/reader.h"

namespace espalier::cli {

// Notes of the reader (unknown fields and the like) go to the progress and, under "notes", into the result.
// retokenizing_model, rows: as ReadOptions has them. vocabulary: a token id at or above it is an error; 0: not checked.
RolloutFile read_for(Context& context, const std::vector<std::string>& paths, std::int64_t vocabulary = 0,
                     const std::string& retokenizing_model = "", const TextRows& rows = {});

}  // namespace espalier::cli
