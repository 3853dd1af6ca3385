// --train: which parameters of a model train, from words or expressions over their Hugging Face names.
//
// The words, separated by commas, each stand for a group of parameters:
//   all         everything (the default)
//   embeddings  the token embedding; of a tied head the head, too
//   norms       every RMSNorm
//   attention   query, key, value and output projections
//   mlp         dense MLPs
//   router      routers of expert layers
//   experts     experts of expert layers
//   head        the language-model head; a critic's value head
// A module's name ("o_proj") stands for all parameters of such modules. Anything with other characters than letters,
// digits and "_" is a regular expression (ECMAScript) that matches a whole tensor name: "model.layers.3[01]\\..*".
// The value head of a critic always trains.
#pragma once

#include <filesystem>
#include <string>

#include "espalier/plan/model_shape.h"

namespace espalier {

// The shape with its `trained` set. Errors: OptionError for an unknown word, a damaged expression, an item that
// matches nothing (a critic may lack what an item names), and for parts of what one product computes: keys and values;
// gate and up; a matrix of all experts of a layer.
ModelShape train_only(ModelShape shape, const std::string& words);
// The same of a model directory or its config.json; of a critic's.
ModelShape read_trained_shape(const std::filesystem::path& directory, const std::string& words);
ModelShape read_trained_critic_shape(const std::filesystem::path& directory, const std::string& words);

}  // namespace espalier
