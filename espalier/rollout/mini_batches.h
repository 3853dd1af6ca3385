// Divides rollouts into groups for advantages and mini-batches for optimizer steps.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "espalier/rollout/rollout.h"

namespace espalier {

// The group of each rollout, numbered from 0 in order of first appearance: equal `group` where given, else equal
// prompts (tokens compared; of the turns of a trajectory, the first turn's). A record with a group and one without are
// never in one group, and where all records have a step a group never spans two steps. Rollouts of a group may stand
// anywhere.
std::vector<std::int64_t> group_of(std::span<const Rollout> rollouts);

// The same as indices into `rollouts`, one ascending list for each group.
std::vector<std::vector<std::int64_t>> groups_of(std::span<const Rollout> rollouts);

bool all_have_step(std::span<const Rollout> rollouts);

// Indices into `rollouts`, one list for each optimizer step; each list ascends.
// Where all records have a `step`: one list for each step, steps ascending. Otherwise whole groups in order of first
// appearance, filled up to `size` rollouts; a group is never split, so one larger than `size` is a mini-batch by
// itself. size 0: all in one. InputError where only some records have a step; OptionError for a negative size.
std::vector<std::vector<std::int64_t>> cut_mini_batches(std::span<const Rollout> rollouts, std::int64_t size);

// A note for the user if mini-batches differ in size from `size`; "" if they do not.
std::string mini_batch_note(std::span<const Rollout> rollouts, const std::vector<std::vector<std::int64_t>>& batches,
                            std::int64_t size);

}  // namespace espalier
