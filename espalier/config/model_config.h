// Reading the shape of a model from its config.json.
#pragma once

#include <filesystem>
#include <string>

#include "espalier/base/json_fwd.h"
#include "espalier/shape/model_shape.h"
#include "espalier/shape/trained_parameters.h"

namespace espalier {

// For ...ForConditionalGeneration, a text model with a vision tower (config/model_families.h), the shape is the text
// model's. Errors: InputError (missing file, bad JSON, missing or absurd member, with the member's name);
// UnsupportedError for properties that are known but refused (mathematics, section 8): dropout, other architectures,
// kinds of layers, routers, rope types or quantisations, and activations other than silu, gelu, gelu_pytorch_tanh and,
// in families whose MLPs have no gate, relu2. Families with recurrent layers take silu alone, except Nemotron-H.
// A tied head whose tensor differs from the embedding's in the directory is untied (config/stored_ties.h).
ModelShape read_model_shape(const std::filesystem::path& directory_or_config);
// True if config.json alone ties the head to the embedding.
bool config_ties_head(const std::filesystem::path& directory_or_config);
ModelShape model_shape_of(const Json& config, const std::string& where);

// A critic's shape, with value_head set. In ...ForTokenClassification and ...ForSequenceClassification with one label
// the head is stored with the weights; from ...ForCausalLM the blocks are used and the head is new. Dropout before the
// head (classifier_dropout) is not applied, as in verl. `architecture` of a language model becomes the token
// classifier's. Errors: as above; UnsupportedError for a family without a token classifier in transformers.
struct CriticShape {
  ModelShape shape;
  bool head_is_stored = false;
};
CriticShape read_critic_shape(const std::filesystem::path& directory_or_config);
CriticShape critic_shape_of(const Json& config, const std::string& where);

// A reward model's shape: as a critic's, but of a ...ForSequenceClassification with one label, whose head has no bias,
// or of the language model that training begins from. Errors: as above; InputError for a token classifier.
CriticShape read_reward_shape(const std::filesystem::path& directory_or_config);
// True where config.json names a ...ForSequenceClassification. Errors: as above for a config that cannot be read.
bool is_reward_model(const std::filesystem::path& directory_or_config);

// train_only of the shape of a model directory or its config.json, read as a reward model's with choice.scores; and as
// a critic's.
ModelShape read_trained_shape(const std::filesystem::path& directory, const TrainedChoice& choice);
ModelShape read_trained_critic_shape(const std::filesystem::path& directory, const TrainedChoice& choice);

}  // namespace espalier
