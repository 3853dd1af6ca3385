// Runs of a set whose rows ranks of cp share (row_shares.h), for layers whose rows pass a state on: cut where a rank's
// rows end, so that the state goes on with another rank's.
#pragma once

#include <cstdint>
#include <vector>

#include "espalier/program/row_shares.h"
#include "espalier/program/step_plan.h"

namespace espalier {

struct SharedRuns {
  SharedRuns(const RowSet& set, const RowShares& shares);

  // Neighbouring rows of one rank; legs that follow each other are of different ranks. A leg's rows begin in the rank's
  // own rows at `own`.
  struct Leg {
    std::int64_t rank, begin, end, own;
    std::size_t first_run, last_run;  // its runs are [first_run, last_run)
  };
  // After a leg, the state at a fork goes to a rank whose runs begin with it.
  struct Transfer {
    std::size_t leg;
    std::int32_t fork;
    std::int64_t to;
  };
  std::vector<Leg> legs;     // in the order of rows
  std::vector<RowRun> runs;  // of rows of the set; parents and forks are among these
  std::int64_t forks = 0;
  std::vector<Transfer> transfers;  // by leg, fork and rank
};

// Room for states that ranks which share a set need besides those at its forks: one for each cut between ranks, of
// which there are 2R - 2, and one for another rank's gradient.
inline std::int64_t shared_states(std::int64_t ranks) { return ranks > 1 ? 2 * ranks - 1 : 0; }

}  // namespace espalier
