// A checkpoint of the closed loop: a Hugging Face directory whose espalier/ holds masters, moments and counters. No
// random state is needed: all random numbers are functions of the seed and the counters.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "espalier/optimizer/adamw.h"
#include "espalier/options/options.h"
#include "espalier/step/critic.h"
#include "espalier/train/trained_model.h"

namespace espalier {

struct LoopState {
  std::int64_t step = 0;           // optimizer steps done
  std::int64_t batches = 0;        // batches done
  std::int64_t metrics_bytes = 0;  // of metrics.jsonl up to here
  std::int64_t prompts_drawn = 0;  // for training
  std::optional<double> accuracy;  // of the last evaluation
  std::string prompts;             // Questions::fingerprint
};

// Writes a checkpoint, complete or absent. `critic` may be null; it goes to critic/. Every rank calls it, and it
// returns when the checkpoint exists. Errors: OptionError.
void save_checkpoint(const std::filesystem::path& directory, const LoopState& state, const ModelState& model,
                     const AdamW& optimizer, Critic* critic, const Options& options);

// A model with the weights of a checkpoint, and its optimizer. Errors: InputError for a checkpoint that is damaged or
// of another dtype.
struct Restored {
  std::unique_ptr<ModelState> model;
  std::unique_ptr<AdamW> optimizer;
  LoopState state;
  std::string note;  // other_sum_order
};
Restored load_checkpoint(const std::filesystem::path& directory, const Options& options,
                         const Mesh& mesh = mesh_of_one());

// Overwrites the critic with that of a checkpoint. Errors: InputError.
void restore_critic(const std::filesystem::path& directory, Critic& critic);

}  // namespace espalier
