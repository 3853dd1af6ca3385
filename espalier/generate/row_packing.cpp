#include "espalier/generate/row_packing.h"

#include <algorithm>

#include "espalier/base/error.h"

namespace espalier {

void RowPacking::add(std::int64_t owner) {
  ESPALIER_INTERNAL(static_cast<std::int64_t>(runs_.size()) < runs_at_most_, "more than ", runs_at_most_, " runs");
  const std::int32_t end = runs_.empty() ? 0 : runs_.back().end;
  runs_.push_back({owner, end, 0, end, 1});
}

void RowPacking::remove(std::int64_t owner) {
  const auto run = std::find_if(runs_.begin(), runs_.end(), [&](const Run& r) { return r.owner == owner; });
  ESPALIER_INTERNAL(run != runs_.end(), "no run of ", owner);
  runs_.erase(run);
  subtree_end_.resize(runs_.empty() ? 0 : static_cast<std::size_t>(runs_.back().end));
}

void RowPacking::keep_first(std::int64_t owner, std::int64_t rows) {
  const auto run = std::find_if(runs_.begin(), runs_.end(), [&](const Run& r) { return r.owner == owner; });
  ESPALIER_INTERNAL(run != runs_.end() && rows <= run->count, rows, " rows of ", owner);
  run->count = static_cast<std::int32_t>(rows);
}

void RowPacking::make_room(std::vector<Move>& moves) {
  moves.clear();
  if (std::ranges::none_of(runs_, [](const Run& run) { return run.begin + run.count + run.more > run.end; })) return;
  constexpr std::int64_t kLeastRoom = 16, kShare = 16;  // room for 16 rows, or for a sixteenth of what there is
  std::vector<std::int32_t> begin(1, 0);
  for (const Run& run : runs_) {
    ESPALIER_INTERNAL(run.count + run.more <= longest_, run.count, " rows of ", longest_);
    const std::int64_t room = std::max<std::int64_t>({kLeastRoom, run.count / kShare, run.more});
    const std::int64_t rows = std::min(longest_, run.count + room);
    begin.push_back(begin.back() + static_cast<std::int32_t>(rows));
  }
  const auto move = [&](Run& run, std::int32_t to) {
    if (run.begin != to && run.count > 0) moves.push_back({run.begin, to, run.count});
    run.begin = to;
  };
  // To the front first where some run moves down; then no copy below meets a run that still waits for its own.
  bool all_up = true;
  for (std::size_t i = 0; i < runs_.size(); ++i) all_up &= begin[i] >= runs_[i].begin;
  std::int32_t front = 0;
  for (std::size_t i = 0; i < runs_.size() && !all_up; ++i) {
    move(runs_[i], front);
    front += runs_[i].count;
  }
  for (std::size_t i = runs_.size(); i-- > 0;) {
    move(runs_[i], begin[i]);
    runs_[i].end = begin[i + 1];
  }
  subtree_end_.clear();
  for (const Run& run : runs_)
    subtree_end_.insert(subtree_end_.end(), static_cast<std::size_t>(run.end - run.begin), run.end);
  touched_ = std::max(touched_, rows());
}

void RowPacking::grow() {
  for (Run& run : runs_) run.count += run.more;
}

}  // namespace espalier
