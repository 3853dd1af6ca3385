#include "espalier/phase/in_step.h"

#include <algorithm>

#include "espalier/base/error.h"
#include "espalier/phase/schedule.h"
#include "espalier/plan/row_shares.h"

namespace espalier {
namespace {

class Recorder : public Executor {
 public:
  Recorder(bool trains, std::int64_t cp_rank) : trains_(trains), cp_rank_(cp_rank) {}

  void open_trunk(const PlanItem&) override { add(Pass::forward); }
  void run_wave(const PlanItem& item) override {
    if (runs_on(item, cp_rank_)) add(Pass::forward), add(Pass::backward);
  }
  void close_trunk(const PlanItem&) override { add(Pass::backward); }

  std::string passes;

 private:
  void add(Pass pass) {
    if (trains_ || pass == Pass::forward) passes += static_cast<char>(pass);
  }

  bool trains_;
  std::int64_t cp_rank_;
};

}  // namespace

std::string passes_of(const StepPlan& plan, bool trains, std::int64_t cp_rank) {
  Recorder recorder(trains, cp_rank);
  run_schedule(plan.items, recorder);
  return recorder.passes;
}

std::string common_order(std::vector<std::string> ranks) {
  for (std::string& passes : ranks) std::ranges::reverse(passes);  // the next one is the last
  std::string order;
  for (;;) {
    const std::string& longest = *std::ranges::max_element(ranks, {}, &std::string::size);
    if (longest.empty()) return order;
    order += longest.back();
    for (std::string& passes : ranks)
      if (!passes.empty() && passes.back() == order.back()) passes.pop_back();
  }
}

InStep::InStep(const StepRun& step, const StepPlan& plan) : step_(step) {
  const Mesh& mesh = step.decoder.mesh();
  if (mesh.degrees.ep <= mesh.degrees.tp) return;
  ESPALIER_INTERNAL_EQ(mesh.pp.size(), 1, "stages keep waves in flight, which is another order of passes");
  const std::string own = passes_of(plan, step.trains(), mesh.cp.rank());
  std::vector<std::string> all;
  for (int rank = 0; rank < mesh.ep.size(); ++rank) all.push_back(text_of_rank(mesh.ep, own, rank));
  order_ = common_order(std::move(all));
}

void InStep::join() {
  if (static_cast<Pass>(order_.at(next_++)) == Pass::forward)
    step_.decoder.join_forward(step_.arena);
  else
    step_.decoder.join_backward(step_.gradients->views(), step_.arena);
}

// In the common order, too, a rank runs the first pass that is of its next one's kind.
void InStep::before(Pass own) {
  if (order_.empty()) return;
  while (order_.at(next_) != static_cast<char>(own)) join();
  ++next_;
}

void InStep::finish() {
  while (!done()) join();
}

}  // namespace espalier
