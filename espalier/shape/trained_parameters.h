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
// With adapters (--lora-rank, --adapter) the adapters train, and the model's own parameters named by the words; none if
// the words are "all".
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "espalier/options/choices.h"
#include "espalier/shape/model_shape.h"
#include "espalier/shape/parameter_shapes.h"

namespace espalier {

// The adapters of a run.
struct AdapterChoice {
  std::int64_t rank = 0;  // 0: none
  double alpha = 16;
  bool root_of_rank = false;
  std::string target = "all-linear";                     // --lora-target
  std::shared_ptr<const std::set<std::string>> modules;  // not null: these have adapters, whatever `target` says
  std::filesystem::path directory;                       // their values; empty: B is 0, and A drawn from `seed`
  std::uint64_t seed = 0;
  bool draws_b = false;     // B is drawn like A: a check that a B of 0 would hide from
  bool value_head = false;  // `directory` has the critic's
  bool any_rank = false;    // also one above the smaller side of a target

  bool operator==(const AdapterChoice&) const = default;
};

// The choice of trained parameters: the words of --train, and adapters.
struct TrainedChoice {
  TrainedChoice() = default;
  TrainedChoice(std::string of_words) : words(std::move(of_words)) {}  // NOLINT(google-explicit-constructor)
  TrainedChoice(const char* of_words) : words(of_words) {}             // NOLINT(google-explicit-constructor)
  TrainedChoice(std::string of_words, AdapterChoice adapters)
      : words(std::move(of_words)), adapter(std::move(adapters)) {}

  std::string words = "all";
  AdapterChoice adapter;
  bool scores = false;                           // of a reward model (--objective reward)
  bool narrow = false;                           // held matrices stay in bfloat16 if the files store them so
  quantised::Kind held = quantised::Kind::none;  // held matrices of layers are in this form
  bool frozen = false;                           // nothing trains: the model is scored with, or sampled from
};

// Modules that can have an adapter, as transformers calls them: "model.layers.0.self_attn.q_proj", "lm_head";
// "model.layers.0.mlp.experts.gate_up_proj", the parameter of all experts of a layer.
std::vector<std::string> adaptable_modules(const ModelShape& shape);

// True if there are adapters and nothing else trains, so that the model's own parameters do not change.
bool trains_adapters_alone(const ModelShape& shape);
// True if the experts of any layer have an adapter.
bool adapts_experts(const ModelShape& shape);

// The shape with its `trained` set. Errors: OptionError for a damaged expression; for an item that matches nothing (a
// critic may lack what an item names); for some but not all parameters that one product reads (keys and values; gate
// and up; a matrix of all experts of a layer); for a target of adapters that matches nothing, names the embedding, or
// trains besides; for a rank above the smaller side of a target, unless any_rank is set; and for choice.held without
// adapters, unless nothing trains. UnsupportedError for adapters in a model that takes none (takes_adapters, or beside
// a vision tower), for an adapter of a module that cannot have one, and for NF4 with rows that are no whole blocks.
ModelShape train_only(ModelShape shape, const TrainedChoice& choice);

}  // namespace espalier
