// Sums the counts of a step over dp, cp and pp, so that every rank reports the numbers of a single process.
#pragma once

#include <cstdint>
#include <vector>

#include "espalier/execute/language_head.h"
#include "espalier/objective/objective.h"
#include "espalier/objective/value_loss.h"
#include "espalier/step/mini_batch.h"
#include "espalier/step/pass.h"

namespace espalier {

// Sums parts of a loss. Their denominators are counted over the whole mini-batch, so the parts add up.
void add_over_ranks(const Mesh& mesh, LossParts& parts);
void add_over_ranks(const Mesh& mesh, ValueLossParts& parts);

// Merges series whose tokens were scored on different ranks (NaN elsewhere): every rank then has all values.
void gather_series(const Mesh& mesh, std::vector<RolloutSeries>& series);
void gather_series(const Mesh& mesh, TokenSeries& values);

// Gathers the routers' choices to every rank. Each rollout ran on one rank.
void gather_choices(Group& dp, moe::ChosenExperts& choices);

// The report of all ranks. Rows are summed; trunks, waves and FLOPs over dp only, because ranks of cp share them;
// seconds and bytes are maxima; schedules are the union. The plan keeps the items and trees of this rank.
PassReport joined(const Mesh& mesh, PassReport report);

}  // namespace espalier
