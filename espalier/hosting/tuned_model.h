// One client's model in training: additions to a base model (shape/additions.h), their gradient and their optimizer.
//
// The gradient lives between calls: each call adds its own, a step uses the sum. A call that fails adds nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "espalier/hosting/call_memory.h"
#include "espalier/hosting/datum_rollouts.h"
#include "espalier/hosting/hosted_base.h"
#include "espalier/optimizer/adamw.h"
#include "espalier/serve/calls.h"
#include "espalier/serve/engine.h"
#include "espalier/state/held_models.h"
#include "espalier/state/model_state.h"

namespace espalier {

class TunedModel {
 public:
  // Fresh additions, drawn from the seed. `base` and `hosting` must outlive the object. `pause`, if there is
  // one, is called between its tensors; here and below. Errors: as adapted_model.
  TunedModel(HostedBase& base, Hosting& hosting, const serve::TunedPart& part, const serve::Pause& pause = {});
  // The additions of a checkpoint. Without `optimizer` its moments and its count of steps are left there.
  TunedModel(HostedBase& base, Hosting& hosting, const serve::TunedPart& part, const std::filesystem::path& folder,
             bool optimizer, const serve::Pause& pause = {});

  // The answers to calls that run as one: one call, or several that all go backward. `pause` is called between items of
  // the plan. Errors: InputError for a loss that is not finite; MemoryBudgetError with the budget that would suffice;
  // what `pause` throws. The gradient is then as it was.
  std::vector<serve::TrainingOutcome> forward_backward(const std::vector<const serve::TrainingCall*>& calls,
                                                       const serve::Pause& pause);
  void break_gradient(const std::string& why);
  bool has_gradient() const { return gradient_.defined() || broken_; }  // or the wreck of one
  // No call runs, and there is no gradient.
  bool is_idle() const { return !runs_ && !has_gradient(); }
  // Errors: InputError, without a step and with the gradient dropped, if it is broken or not finite.
  AdamW::Update step(const serve::AdamParams& params, const serve::Pause& pause = {});

  // Writes the additions as peft has them into a directory that exists, with `state` also what exact continuation
  // needs.
  void write(const std::filesystem::path& directory, bool state, const serve::Pause& pause = {});

  const serve::TunedPart& part() const { return part_; }
  HostedBase& base() const { return base_; }
  const ModelState& model() const { return *model_; }
  AdamW& optimizer() { return optimizer_; }
  // Bytes of the additions, their gradients and their optimizer.
  std::int64_t held_bytes() const { return bytes_of(base_, part_); }
  static std::int64_t bytes_of(const HostedBase& base, const serve::TunedPart& part);

 private:
  struct Pass;
  Pass run_backward(const DatumRollouts& data, CallMemory::Turns& turns);
  Pass run_forward(const DatumRollouts& data, CallMemory::Turns& turns);
  // Runs `pass` with options whose plan fits.
  void run_planned(const HeldModel& held, const std::function<void(const Options&)>& pass);
  void add_gradient(const at::Tensor& gradient);
  void drop_gradient();
  // Runs the data once more without sharing: the difference of the gradients, relative to the gradient.
  double check_gradient(const DatumRollouts& data, const at::Tensor& gradient, const Options& options,
                        CallMemory::Turns& turns);

  HostedBase& base_;
  Hosting& hosting_;
  serve::TunedPart part_;
  std::unique_ptr<ModelState> model_;
  AdamW optimizer_;
  at::Tensor gradient_;                // undefined: zero
  bool runs_ = false;                  // a call or a step does, or the model is being saved; others may have their turn
  std::int64_t calls_ = 0;             // that went backward
  std::optional<std::string> broken_;  // why a part of the gradient is missing
};

// Reads the weights of a checkpoint.
std::unique_ptr<ModelState> load_tuned(const HostedBase& base, const serve::TunedPart& part,
                                       const std::filesystem::path& folder, const serve::Pause& pause = {});
// Errors: what load_tuned, and with `optimizer` TunedModel, would find wrong before they read a value.
void check_checkpoint(const HostedBase& base, const std::filesystem::path& folder, bool optimizer);

// The additions that a client asks for.
AdditionChoice additions_of(const serve::TunedPart& part, const ModelShape& shape);

}  // namespace espalier
