// act_rf = silu(gate_rf) up_rf, and back. Shapes: R rows, F inner width; gate_up [R, 2 F] holds gate, then up.
#pragma once

#include <ATen/core/Tensor.h>

namespace espalier {

struct SwigluOperations {
  // Overwrites act.
  void (*swiglu)(const at::Tensor& gate_up_RW, const at::Tensor& act_RF);
  // Overwrites grad_gate_up, which may be gate_up itself, and act with what swiglu gives; act may be grad_act itself.
  void (*swiglu_backward)(const at::Tensor& gate_up_RW, const at::Tensor& grad_act_RF,
                          const at::Tensor& grad_gate_up_RW, const at::Tensor& act_RF);
};

}  // namespace espalier
