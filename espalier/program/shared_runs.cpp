#include "espalier/program/shared_runs.h"

#include <algorithm>
#include <tuple>

namespace espalier {
namespace {

std::vector<SharedRuns::Leg> legs_of(const RowShares& shares) {
  std::vector<SharedRuns::Leg> legs;
  for (std::int64_t rank = 0; rank < shares.ranks(); ++rank) {
    std::int64_t own = 0;
    for (const RowShares::Piece& piece : shares.pieces(rank)) {
      if (piece.size() > 0) legs.push_back({rank, piece.begin, piece.end, own, 0, 0});
      own += piece.size();
    }
  }
  std::ranges::sort(legs, {}, &SharedRuns::Leg::begin);
  std::vector<SharedRuns::Leg> out;
  for (const SharedRuns::Leg& leg : legs)
    if (!out.empty() && out.back().rank == leg.rank)
      out.back().end = leg.end;
    else
      out.push_back(leg);
  return out;
}

}  // namespace

SharedRuns::SharedRuns(const RowSet& set, const RowShares& shares) : legs(legs_of(shares)) {
  std::vector<std::int32_t> last;  // of each whole run, the number of its last part
  std::vector<std::size_t> leg_of;
  std::size_t leg = 0;
  for (const RowRun& whole : runs_of(set)) {
    std::int32_t parent = whole.parent < 0 ? -1 : last[static_cast<std::size_t>(whole.parent)];
    for (std::int32_t begin = whole.begin; begin < whole.end; begin = runs.back().end) {
      while (legs[leg].end <= begin) ++leg;
      const auto end = static_cast<std::int32_t>(std::min<std::int64_t>(whole.end, legs[leg].end));
      runs.push_back({begin, end, parent, -1});
      leg_of.push_back(leg);
      parent = static_cast<std::int32_t>(runs.size()) - 1;
    }
    last.push_back(parent);
  }
  for (std::size_t run = runs.size(); run-- > 0;) {
    legs[leg_of[run]].first_run = run;
    if (legs[leg_of[run]].last_run == 0) legs[leg_of[run]].last_run = run + 1;
    if (runs[run].parent >= 0) runs[static_cast<std::size_t>(runs[run].parent)].fork = 0;
  }
  for (RowRun& run : runs)
    if (run.fork == 0) run.fork = static_cast<std::int32_t>(forks++);
  for (std::size_t run = 0; run < runs.size(); ++run) {
    if (runs[run].parent < 0) continue;
    const auto before = static_cast<std::size_t>(runs[run].parent);
    const Transfer transfer{leg_of[before], runs[before].fork, legs[leg_of[run]].rank};
    if (legs[transfer.leg].rank != transfer.to) transfers.push_back(transfer);
  }
  const auto key = [](const Transfer& t) { return std::tuple(t.leg, t.fork, t.to); };
  std::ranges::sort(transfers, {}, key);
  const auto same = std::ranges::unique(transfers, {}, key);
  transfers.erase(same.begin(), same.end());
}

}  // namespace espalier
