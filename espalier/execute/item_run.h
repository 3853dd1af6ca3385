// The run of one plan item: the forward with its log-probs and losses, later the backward.
#pragma once

#include <memory>

#include "espalier/execute/item_input.h"
#include "espalier/execute/step_run.h"
#include "espalier/model/kv_source.h"
#include "espalier/model/path_guest.h"
#include "espalier/saved/sleeping_trunk.h"

namespace espalier {

class ItemRun {
 public:
  // Takes its buffers from the arena; the caller releases them after the backward.
  ItemRun(const StepRun& step, const PlanItem& item, Arena& arena);

  // Runs the rows forward and lets the head score their edges. Token-level objectives take their derivative in the same
  // pass. Sequence-level objectives are evaluated for the rollouts whose last log-prob was in this item.
  void forward();

  // Adds the gradients of every parameter and of the path above. A trunk's backward runs after everything below it.
  // Overwrites penalty [expert layers, 2] with the values of the router losses; undefined without router losses.
  void add_backward(const at::Tensor& penalty_L2);

  // Announces that the backward is near: offloaded layers are fetched ahead.
  void ask_ahead() {
    if (sleeping_) sleeping_->ask_ahead();
  }

  std::int64_t rows() const { return input_.model.rows(); }
  // For a trunk: the final states of its recurrent layers, and the buffers for their gradients.
  const OpenPath::States& states() const { return states_; }

 private:
  HeadWork head_work() const { return {item_, input_, saved_.normed_OM, grad_normed_OM_}; }
  void take_choices();
  // Adds the router choices that other ranks of cp counted for the item's rollouts, if a loss needs all of them.
  void join_counts();
  DecoderRun decoder_run() { return {input_.model, *kv_, arena_, step_.timer}; }
  RouterPenalties penalties(const at::Tensor& value_L2) const;

  const StepRun& step_;
  const PlanItem& item_;
  Arena& arena_;
  ItemInput input_;
  OpenPath::States states_;
  std::unique_ptr<KvSource> kv_;
  PathGuest path_;
  DecoderSaved saved_;
  at::Tensor grad_normed_OM_;
  std::unique_ptr<SleepingTrunk> sleeping_;  // the trunk's layers, if the plan offloads them
};

// Called by a rank without an item of its own while others run forward() or add_backward(). `on_path`: the others are
// ranks of its cp group, and the path is sharded over cp.
void join(const StepRun& step, Pass pass, bool on_path);

}  // namespace espalier
