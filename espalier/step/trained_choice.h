// What a run trains, from its options: the words of --train, and adapters (--lora-..., --adapter, and those of a run
// that
// --resume continues).
#pragma once

#include <string>

#include "espalier/options/options.h"
#include "espalier/plan/trained_parameters.h"

namespace espalier {

// The directory that the model comes from: --model; else what --resume names, or, where that holds an adapter, the
// directory that the adapter's config names. Empty: neither is given. Errors: InputError where the adapter names no
// directory.
std::string model_source(const Options& options);

// With a directory of an adapter its modules, rank and scale are the choice, and its modules_to_save train. Reads both
// of its files and compares them with the model's config. Errors: as Adapter; OptionError for a --lora-rank that is not
// the adapter's.
TrainedChoice trained_choice(const Options& options);

// The adapter of a model that is only scored with, or sampled from. With `takes_reward_models` it may be a
// ...ForSequenceClassification.
TrainedChoice scored_choice(const Options& options, bool takes_reward_models = false);

}  // namespace espalier
