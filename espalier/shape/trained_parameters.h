// --train: which parameters of a model train, from words or expressions over their Hugging Face names.
//
// The words, separated by commas, each stand for a group of parameters:
//   all         everything (the default)
//   embeddings  the token embedding; of a tied head the head, too
//   norms       every norm, with its bias
//   attention   the parameters of attention and of recurrent layers' mixers, without their norms
//   mlp         dense MLPs, and shared experts below "mlp" or "shared_mlp"
//   router      routers of expert layers
//   experts     experts of expert layers
//   head        the language-model head; a critic's value head
// A module's name ("o_proj") stands for all parameters of such modules. Anything with other characters than letters,
// digits and "_" is a regular expression (ECMAScript) that matches a whole tensor name: "model.layers.3[01]\\..*".
// The value head of a critic or reward model always trains; a reward model's has no bias.
//
// With additions (shape/additions.h) these train, and the model's own parameters named by the words; none if the words
// are "all".
#pragma once

#include <string>
#include <utility>

#include "espalier/options/choices.h"
#include "espalier/shape/additions.h"
#include "espalier/shape/model_shape.h"
#include "espalier/shape/parameter_shapes.h"

namespace espalier {

// The choice of trained parameters: the words of --train, and additions.
struct TrainedChoice {
  TrainedChoice() = default;
  TrainedChoice(std::string of_words) : words(std::move(of_words)) {}  // NOLINT(google-explicit-constructor)
  TrainedChoice(const char* of_words) : words(of_words) {}             // NOLINT(google-explicit-constructor)
  TrainedChoice(std::string of_words, AdditionChoice additions)
      : words(std::move(of_words)), added(std::move(additions)) {}

  std::string words = "all";
  AdditionChoice added;
  bool scores = false;                           // of a reward model (--objective reward)
  bool narrow = false;                           // held matrices stay in bfloat16 if the files store them so
  quantised::Kind held = quantised::Kind::none;  // held matrices of layers are in this form
  bool frozen = false;                           // nothing trains: the model is scored with, or sampled from
};

// True if there are additions and nothing else trains, so that the model's own parameters do not change.
bool keeps_own_parameters(const ModelShape& shape);

// The shape with its `trained` set. Errors: OptionError for a damaged expression; for an item that matches nothing (a
// critic may lack what an item names); for some but not all parameters that one product reads (keys and values; gate
// and up; a matrix of all experts of a layer); for an adapted matrix that trains besides; and for choice.held without
// additions, unless nothing trains. UnsupportedError for NF4 with rows that are no whole blocks. Both: as
// add_additions.
ModelShape train_only(ModelShape shape, const TrainedChoice& choice);

}  // namespace espalier
