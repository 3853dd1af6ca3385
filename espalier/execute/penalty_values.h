// The values of the router losses. They stay on the device until all items have run.
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/execute/step_run.h"
#include "espalier/program/program.h"

namespace espalier {

class PenaltyValues {
 public:
  PenaltyValues(const StepRun& step, const Program& program);

  // The buffer [expert layers, 2] for the next backward of an own item; undefined without router losses.
  at::Tensor next() { return values_IL2_.defined() ? values_IL2_.select(0, backwards_++) : at::Tensor(); }
  // Adds the values to the step's accounting: items in the order of their backwards, each from its last layer to its
  // first. Waits for the device.
  void add_up() const;

 private:
  const StepRun& step_;
  at::Tensor values_IL2_;
  std::int64_t backwards_ = 0;
};

}  // namespace espalier
