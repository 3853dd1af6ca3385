// Ranks of ep that run other rows than each other, as those of dp do, still meet in every layer of experts: they take
// forward and backward passes in one common order, and who has no rows of its own for a pass joins without any.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "espalier/phase/step_run.h"

namespace espalier {

enum class Pass : char { forward = 'f', backward = 'b' };

// The passes of a plan that a rank of cp runs, in order.
std::string passes_of(const StepPlan& plan, bool trains, std::int64_t cp_rank = 0);

// The shortest order that a simple rule finds in which every rank's passes are contained in theirs: the next pass is
// always that of the rank with most to do, the lowest among equals; all who are about to run such a pass do.
std::string common_order(std::vector<std::string> passes_of_ranks);

class InStep {
 public:
  // Every rank of ep makes one for the same run. Nothing happens where all of them have the same rows.
  InStep(const StepRun& step, const StepPlan& plan);

  void before(Pass own);  // this rank is about to run one: joins those that come first
  bool done() const { return next_ == order_.size(); }
  void finish();  // joins what the others still run

 private:
  void join();

  const StepRun& step_;
  std::string order_;  // empty: all have the same rows
  std::size_t next_ = 0;
};

}  // namespace espalier
