// One client's model in training: an adapter over a base model, its gradient and its optimizer.
//
// The gradient lives between calls: each call adds its own, a step uses the sum. A call that fails adds nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "espalier/hosting/hosted_base.h"
#include "espalier/optimizer/adamw.h"
#include "espalier/serve/calls.h"
#include "espalier/step/model_state.h"

namespace espalier {

class TunedModel {
 public:
  // A fresh adapter: A drawn from the seed, B zero. `base` and `hosting` must outlive the object. Errors: as
  // adapted_model.
  TunedModel(HostedBase& base, Hosting& hosting, const serve::LoraConfig& lora);

  // Errors: InputError for a loss that is not finite; MemoryBudgetError with the budget that would suffice. A call that
  // goes backward then breaks the gradient.
  serve::TrainingAnswer forward_backward(const serve::TrainingCall& call);
  void break_gradient(const std::string& why);
  // Errors: InputError, without a step and with the gradient dropped, if it is broken or not finite.
  AdamW::Update step(const serve::AdamParams& params);

  const serve::LoraConfig& lora() const { return lora_; }
  HostedBase& base() const { return base_; }
  const ModelState& model() const { return *model_; }
  AdamW& optimizer() { return optimizer_; }
  // Bytes of the adapter, its gradients and its optimizer.
  std::int64_t held_bytes() const;

 private:
  struct Pass;
  Pass run_backward(const serve::TrainingCall& call);
  Pass run_forward(const serve::TrainingCall& call);
  void add_gradient(const at::Tensor& gradient);
  void drop_gradient();

  HostedBase& base_;
  Hosting& hosting_;
  serve::LoraConfig lora_;
  std::unique_ptr<ModelState> model_;
  AdamW optimizer_;
  at::Tensor gradient_;                // undefined: zero
  std::optional<std::string> broken_;  // why a part of the gradient is missing
};

// The adapter that a client asks for.
AdapterChoice adapter_choice(const serve::LoraConfig& lora, const ModelShape& shape);

}  // namespace espalier
