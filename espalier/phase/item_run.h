// One plan item on its way: forward with its log-probs and losses, later its backward.
#pragma once

#include <memory>

#include "espalier/model/kv_source.h"
#include "espalier/model/path_guest.h"
#include "espalier/phase/item_input.h"
#include "espalier/phase/step_run.h"
#include "espalier/saved/sleeping_trunk.h"

namespace espalier {

class ItemRun {
 public:
  // Takes what it needs from the arena; the caller releases it after the backward.
  ItemRun(const StepRun& step, const PlanItem& item, Arena& arena);

  // Forwards the rows and has the head score their edges. Token-level objectives take their derivative in the same
  // pass; sequence-level ones are evaluated for the rollouts whose last log-prob this was.
  void forward();

  // Adds the gradients of every parameter and of the path above. A trunk's comes after everything below it. Overwrites
  // penalty [expert layers, 2] with the values of the router losses; undefined where there are none.
  void add_backward(const at::Tensor& penalty_L2);

  // The backward is near: what was stored away is fetched ahead.
  void ask_ahead() {
    if (sleeping_) sleeping_->ask_ahead();
  }

  std::int64_t rows() const { return input_.model.rows(); }
  // Of a trunk: what its layers whose rows carry a state leave, and room for the gradients of that.
  const KvPath::States& states() const { return states_; }

 private:
  HeadWork head_work() const { return {item_, input_, saved_.normed_OM, grad_normed_OM_}; }
  void take_choices();
  // Counts of choices that other ranks of cp have made of the item's rollouts, where losses need them all.
  void join_counts();
  DecoderRun decoder_run() { return {input_.model, *kv_, arena_, step_.timer}; }
  RouterPenalties penalties(const at::Tensor& value_L2) const;

  const StepRun& step_;
  const PlanItem& item_;
  Arena& arena_;
  ItemInput input_;
  KvPath::States states_;
  std::unique_ptr<KvSource> kv_;
  PathGuest path_;
  DecoderSaved saved_;
  at::Tensor grad_normed_OM_;
  std::unique_ptr<SleepingTrunk> sleeping_;  // its layers, where the plan stores them away
};

// Run by a rank without an item of its own while others run forward, or add_backward. `on_path`: they are ranks of
// its cp, and divide the path.
void join(const StepRun& step, Pass pass, bool on_path);

}  // namespace espalier
