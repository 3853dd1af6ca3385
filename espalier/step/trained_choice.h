// What a run trains, from its options: the words of --train, and adapters (--lora-..., --adapter, and those of a run
// that --resume continues).
#pragma once

#include <optional>
#include <string>

#include "espalier/options/options.h"
#include "espalier/shape/trained_parameters.h"

namespace espalier {

// The directory that the model comes from: --model; else what --resume names, or, where that holds an adapter, the
// directory that the adapter's config names. Empty: neither is given. Errors: InputError where the adapter names no
// directory.
std::string model_source(const Options& options);

// With a directory of an adapter its modules, rank and scale are the choice, and its modules_to_save train. Reads both
// of its files and compares them with the model's config. Errors: as Adapter; OptionError for a --lora-rank that is not
// the adapter's.
TrainedChoice trained_choice(const Options& options);

// Whether the model gives every answer one number: a ...ForSequenceClassification, or a language model with an adapter
// of one.
bool scores_answers(const Options& options);

// The adapter of a model that is only scored with, or sampled from. With `takes_reward_models` it may give scores.
TrainedChoice scored_choice(const Options& options, bool takes_reward_models = false);

// A critic: the model directory of its weights, and what of it trains.
struct CriticChoice {
  std::string source;
  TrainedChoice train;
};

// --critic, else critic/ of what --resume names; empty: there is none.
std::string critic_directory(const Options& options);

// The critic of a run. Where critic_directory holds an adapter, that is trained on the model that its config names;
// where --resume continues one, on --critic. Else a run with adapters gives the critic a fresh one of the same rank,
// scale and kinds of modules, drawn from numbers of its own. Errors: as trained_choice.
std::optional<CriticChoice> trained_critic(const Options& options);
// The critic whose values are asked for: --critic, a model directory or an adapter of one.
std::optional<CriticChoice> scored_critic(const Options& options);
ModelShape read_critic_shape(const CriticChoice& critic);

}  // namespace espalier
