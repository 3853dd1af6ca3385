// Counts of a step summed over the ranks of dp, cp and pp: every rank then reports what one process would.
#pragma once

#include <cstdint>
#include <vector>

#include "espalier/objective/objective.h"
#include "espalier/objective/value_loss.h"
#include "espalier/phase/language_head.h"
#include "espalier/step/mini_batch.h"
#include "espalier/step/pass.h"

namespace espalier {

// Parts of a loss whose denominators are the whole mini-batch's, so that they add.
void add_over_ranks(const Mesh& mesh, LossParts& parts);
void add_over_ranks(const Mesh& mesh, ValueLossParts& parts);

// Series of rollouts whose tokens were scored on one rank or another, NaN elsewhere: all of them on every rank.
void gather_series(const Mesh& mesh, std::vector<RolloutSeries>& series);
void gather_series(const Mesh& mesh, TokenSeries& values);

// Gathers the routers' choices for rollouts, each of which ran on one rank, to every rank.
void gather_choices(Group& dp, moe::ChosenExperts& choices);

// The report of all ranks: rows are summed; trunks, waves and FLOPs over dp, since ranks of cp share them; seconds and
// bytes are those of the rank with most; schedules are those of any. The plan keeps the items and trees of this rank.
PassReport joined(const Mesh& mesh, PassReport report);

}  // namespace espalier
