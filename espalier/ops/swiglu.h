// act_rf = f(gate_rf) up_rf, and back (ActivationRule). Shapes: R rows, F inner width; gate_up [R, 2 F] holds gate,
// then up; without a gate [R, F] up alone, and act_rf = f(up_rf).
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/shape/block_kinds.h"

namespace espalier {

struct SwigluOperations {
  // Overwrites act.
  void (*swiglu)(const ActivationRule& rule, const at::Tensor& gate_up_RW, const at::Tensor& act_RF);
  // Overwrites grad_gate_up, which may be gate_up itself, and act with what swiglu gives; act may be grad_act itself.
  void (*swiglu_backward)(const ActivationRule& rule, const at::Tensor& gate_up_RW, const at::Tensor& grad_act_RF,
                          const at::Tensor& grad_gate_up_RW, const at::Tensor& act_RF);
};

}  // namespace espalier
