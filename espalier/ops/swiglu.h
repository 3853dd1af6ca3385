// act_rf = f(gate_rf) up_rf, and its backward (ActivationRule). Shapes: R rows, F inner width; gate_up [R, 2 F] holds
// gate, then up. Without a gate it is [R, F], up only, and act_rf = f(up_rf).
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/shape/block_kinds.h"

namespace espalier {

struct SwigluOperations {
  // Overwrites act.
  void (*swiglu)(const ActivationRule& rule, const at::Tensor& gate_up_RW, const at::Tensor& act_RF);
  // Overwrites grad_gate_up, which may be gate_up itself, and act with swiglu's result; act may be grad_act itself.
  void (*swiglu_backward)(const ActivationRule& rule, const at::Tensor& gate_up_RW, const at::Tensor& grad_act_RF,
                          const at::Tensor& grad_gate_up_RW, const at::Tensor& act_RF);
};

}  // namespace espalier
