// A model in memory: its shape, the table of its parameters, and the weights.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include "espalier/checkpoint/mapped_weights.h"
#include "espalier/metrics/progress.h"
#include "espalier/model/decoder.h"
#include "espalier/model/gathered_weights.h"
#include "espalier/model/parameters.h"
#include "espalier/parallel/mesh.h"
#include "espalier/shape/trained_parameters.h"

namespace espalier {

struct ModelState {
  // Weights are uninitialised, except for padding, which is 0. With one rank the shape is the whole model.
  // `in_files`: the shape's mapped parameters; null if it has none. `beside`: a model whose held weights are used, too,
  // without a copy; null: the model has its own.
  ModelState(const LocalShape& model_shape, DType model_dtype, Device& device = bound_device(),
             const Mesh& ranks = mesh_of_one(), std::unique_ptr<const MappedWeights> in_files = nullptr,
             const ModelState* beside = nullptr);

  const Mesh& mesh;  // must outlive the object
  ModelShape shape;  // of the whole model
  DType dtype;
  std::string row_by_row;  // why recurrent layers do not run in chunks (layers_without_chunks); empty: nothing is said
  ParameterTable table;    // trained parameters; all unless --train selects some
  at::Tensor weights;      // flat, in the table's layout, on the device
  at::Tensor rooms;        // buffers for gathered units (shape/units.h)
  ParameterTable held_table;  // held parameters, which never change
  at::Tensor held_weights, held_rooms;
  ParameterTable narrow_table;  // held matrices that stay in bfloat16 (TrainedParameters::narrow)
  at::Tensor narrow_weights;
  ParameterTable mapped_table;                  // narrow matrices that are read in place from mapped files
  std::unique_ptr<const MappedWeights> mapped;  // null: none
  ParameterTable quantised_table;               // held matrices in few bits (TrainedParameters), in bytes
  at::Tensor quantised_weights;
  // Correction biases of this rank's routers, in the order of its expert layers, in the accumulator dtype, because
  // rounded to bfloat16 they would choose other experts. Undefined if there are none, or if weights have that dtype.
  at::Tensor corrections_LE;
  GatheredWeights gathered;      // gathers units of sharded weights
  std::filesystem::path source;  // the directory they came from; empty for random weights
  Decoder decoder;               // reads `weights`
  std::int64_t updates = 0;      // optimizer steps since loading; identifies these weights
};

// This rank's part of a model. Errors: as LocalShape.
LocalShape local_shape(const ModelShape& shape, const Mesh& mesh);

// Weights of a Hugging Face directory, converted to dtype, and additions. `train`: the parameters that train; with
// train.scores the model is a reward model, or a language model with a new head, reported in a note. Errors: as
// read_model_shape, train_only, load_parameters, open_added_values and require_device_adds.
std::unique_ptr<ModelState> load_model(const std::filesystem::path& directory, DType dtype, Progress& progress,
                                       const Mesh& mesh = mesh_of_one(), const TrainedChoice& train = {});

// A critic's weights: a token classifier with one label; or the blocks of a language model under a new value head,
// normal(0, initializer_range) from `seed` with bias 0, reported in a note. Errors: as read_critic_shape and
// load_parameters.
std::unique_ptr<ModelState> load_value_model(const std::filesystem::path& directory, DType dtype, std::uint64_t seed,
                                             Progress& progress, const Mesh& mesh = mesh_of_one(),
                                             const TrainedChoice& train = {});

// A model with additions of its own to the held weights of `base`, a frozen model (TrainedChoice::frozen) on one rank,
// whose tensors it shares. Many such models train beside each other. `between`, if there is one, is called before each
// added parameter. Errors: as train_only and open_added_values.
std::unique_ptr<ModelState> adapted_model(const ModelState& base, const AdditionChoice& added,
                                          const std::function<void()>& between = {});
// The same with the values that the additions have now, which later updates of `model` do not change.
std::unique_ptr<ModelState> snapshot_of(const ModelState& model);

// A decoder with the model's own parameters and without additions. The model must outlive it.
std::unique_ptr<Decoder> decoder_without_additions(const ModelState& model);

// Random weights, for most families as in Hugging Face: parameters of norms 1, biases 0, all others normal(0,
// initializer_range); added rows as they say (Start). The same numbers on every machine and under every layout.
std::unique_ptr<ModelState> random_model(const ModelShape& shape, DType dtype, std::uint64_t seed,
                                         const Mesh& mesh = mesh_of_one());

}  // namespace espalier
