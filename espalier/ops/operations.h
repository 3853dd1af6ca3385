// All operations on tensors: one table of functions per device, bound once per run (Device::operations).
//
// Model, objective, optimizer and sampler use only these on a device's tensors. Each operation is described in the
// header of its group. Operations named add_... add to some of their results and document which.
#pragma once

#include <string>

#include "espalier/ops/adamw.h"
#include "espalier/ops/attention/operations.h"
#include "espalier/ops/choice.h"
#include "espalier/ops/delta_rule.h"
#include "espalier/ops/experts.h"
#include "espalier/ops/head.h"
#include "espalier/ops/latent.h"
#include "espalier/ops/moving.h"
#include "espalier/ops/norm.h"
#include "espalier/ops/products.h"
#include "espalier/ops/rotation.h"
#include "espalier/ops/short_convolution.h"
#include "espalier/ops/swiglu.h"

namespace espalier {

struct ModelShape;

struct ModelOperations {
  // Errors: UnsupportedError if the device's operations do not support the model. Null: they support every model.
  void (*require_taken)(const ModelShape& shape, at::ScalarType dtype) = nullptr;
  // Recurrent layers in bfloat16 run in chunks once the device has shown that it runs them right. The first call tries
  // it. Returns why they run row by row, for a person; empty: in chunks. Null: there is nothing to try.
  const std::string& (*without_chunks)() = nullptr;
};

struct Operations : NormOperations,
                    RotationOperations,
                    SwigluOperations,
                    ProductOperations,
                    MovingOperations,
                    AttentionOperations,
                    HeadOperations,
                    ExpertOperations,
                    OptimizerOperations,
                    ChoiceOperations,
                    DeltaRuleOperations,
                    ShortConvolutionOperations,
                    LatentOperations,
                    ModelOperations {};

}  // namespace espalier
