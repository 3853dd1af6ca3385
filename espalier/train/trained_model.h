// A model in training on disk: a Hugging Face directory (with additions a directory of these), and beside its
// weights, in espalier/, masters, moments and position.
#pragma once

#include <filesystem>
#include <functional>
#include <string>

#include "espalier/checkpoint/run_state.h"
#include "espalier/optimizer/adamw.h"
#include "espalier/state/model_state.h"
#include "espalier/train/whole_values.h"

namespace espalier {

// The dtype of masters, moments and gradients.
DType accumulator_of(DType dtype);

// The dtype of written weights: the one asked for; source: that of the model's files.
DType saved_dtype(SaveDType asked, const ModelShape& shape);

// On rank 0: fills a directory with the model, trained parameters from the masters as `to`, held ones as the model's
// source stores them.
void write_changed_model(const std::filesystem::path& directory, const ModelState& model, const WholeValues& whole,
                         const ParameterValues& masters, DType to);

// On rank 0: fills a directory with the model's own parameters, every number as its source has it.
void write_own_parameters(const std::filesystem::path& directory, const ModelState& model);

// Every rank calls the functions that write; rank 0 does, the others give it their share of each tensor.

// Fills a directory, usually AtomicDirectory::path(), with the weights that the masters round to, and the other files
// of the model's source. `save_dtype`: of the weights; source: that of most numbers in the source's files. `base`: the
// model that files of additions name; empty: the model's source. `between`, if there is one, is called before each
// tensor.
void write_trained_weights(const std::filesystem::path& directory, const ModelState& model, const AdamW& optimizer,
                           SaveDType save_dtype, const std::string& base = "",
                           const std::function<void()>& between = {});
// The same, with the state that exact continuation needs. Sets `state`'s step, model and number formats.
void save_trained_model(const std::filesystem::path& directory, const ModelState& model, const AdamW& optimizer,
                        RunState state, SaveDType save_dtype, const std::string& base = "",
                        const std::function<void()>& between = {});

// "NCCL sums in another order than before: NCCL_ALGO (...); gradients may differ in their last bits"; empty if a former
// run's ranks summed as this one's, or if one of the two has no NCCL.
std::string other_sum_order(const RunState& former, const ModelState& model);

// Notes the first weight file that the run reads in place (checkpoint/mapped_weights.h) and that has changed since.
void note_changed_files(const ModelState& model, Progress& progress);

// Bytes of the weights and the state that save_trained_model writes for a model that is read from `source`.
std::int64_t bytes_of_saved_model(ModelShape shape, const std::filesystem::path& source, const Options& options);

// Overwrites masters, moments, the optimizer's step and the weights from a directory that save_trained_model
// filled. `between`, if there is one, is called before each tensor. Errors: as load_run_state.
RunState continue_trained_model(const std::filesystem::path& directory, ModelState& model, AdamW& optimizer,
                                const std::function<void()>& between = {});

}  // namespace espalier
