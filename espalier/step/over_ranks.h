// What a step counted on each rank of dp, brought together: every rank then reports what one process would.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/objective/objective.h"
#include "espalier/objective/value_loss.h"
#include "espalier/phase/language_head.h"
#include "espalier/step/mini_batch.h"
#include "espalier/step/pass.h"

namespace espalier {

// Parts of a loss whose denominators are the whole mini-batch's, so that they add.
void add_over_ranks(Group& dp, LossParts& parts);
void add_over_ranks(Group& dp, ValueLossParts& parts);

// Series of rollouts, each of which ran on one rank (`own`: not 0 where on this one): all of them on every rank.
void gather_series(Group& dp, std::span<const std::uint8_t> own, std::vector<RolloutSeries>& series);
void gather_series(Group& dp, std::span<const std::uint8_t> own, TokenSeries& values);

// The report of all ranks: rows, trunks, waves and FLOPs are summed; seconds and bytes are those of the rank with most;
// schedules are those of any. The plan keeps the items and trees of this rank.
PassReport joined(Group& dp, PassReport report);

}  // namespace espalier
