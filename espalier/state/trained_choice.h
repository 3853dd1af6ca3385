// The parameters that a run trains, from its options: --train, and adapters (--lora-..., --adapter, and the adapters of
// a run continued by --resume).
#pragma once

#include <optional>
#include <string>

#include "espalier/config/model_config.h"
#include "espalier/options/options.h"
#include "espalier/shape/trained_parameters.h"

namespace espalier {

// The model's directory: --model; else --resume, or, if that holds an adapter, the directory in the
// adapter's config. Empty: neither option is given. Errors: InputError if the adapter names no
// directory.
std::string model_source(const Options& options);

// An adapter directory sets modules, rank and scale, and its modules_to_save train. Reads both of its files and
// compares them with the model's config. Errors: as Adapter; OptionError if --lora-rank differs from the adapter's
// rank.
TrainedChoice trained_choice(const Options& options);

// True if the options ask for additions; and the refusal of these: `when` says where there can be none.
bool asks_for_additions(const Options& options);
void require_no_additions(const Options& options, const std::string& when, const std::string& remedy);

// True if the model gives every answer one score: a ...ForSequenceClassification, or a language model with an adapter
// of such a model.
bool scores_answers(const Options& options);

// The adapter of a model that only scores or samples. With `takes_reward_models` it may belong to a reward model.
TrainedChoice scored_choice(const Options& options, bool takes_reward_models = false);

// A critic: the model directory of its weights, and its trained parameters.
struct CriticChoice {
  std::string source;
  TrainedChoice train;
};

// --critic, else critic/ in the directory of --resume; empty: there is no critic.
std::string critic_directory(const Options& options);

// The critic of a run. If critic_directory holds an adapter, training continues that adapter on the model in its
// config, or with --resume on --critic. Otherwise a run with adapters gives the critic a fresh adapter of the same
// rank, scale and kinds of modules, drawn from its own random stream. Errors: as trained_choice.
std::optional<CriticChoice> trained_critic(const Options& options);
// The critic that only computes values: --critic, a model directory or the adapter of one.
std::optional<CriticChoice> scored_critic(const Options& options);
ModelShape read_critic_shape(const CriticChoice& critic);

}  // namespace espalier
