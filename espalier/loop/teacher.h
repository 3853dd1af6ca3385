// The teacher of on-policy distillation in the loop (--opd-kl-coef, --teacher-model): a model that scores what the
// policy samples, and never trains.
#pragma once

#include <optional>
#include <span>

#include "espalier/metrics/progress.h"
#include "espalier/options/options.h"
#include "espalier/rollout/rollout.h"
#include "espalier/shape/model_shape.h"

namespace espalier {

// Its shape; empty without a teacher. Errors: OptionError if one of the two options stands without the other; as
// read_model_shape.
std::optional<ModelShape> teacher_shape(const Options& options);

// Notes on a tokenizer that is not the policy's, and on a smaller vocabulary.
void note_teacher(const Options& options, const ModelShape& policy, Progress& progress);

// Errors: InputError if the teacher lacks a token of a rollout.
void require_tokens(const ModelShape& teacher, const Options& options, std::span<const Rollout> rollouts);

}  // namespace espalier
