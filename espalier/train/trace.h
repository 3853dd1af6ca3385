// A trace: a directory with everything that a run's updates depend on, so that anyone can repeat them.
//
//   trace.json        versions, options, dtype, the steps and the checkpoints that were recorded
//   rollouts.jsonl.gz records with `step` (other names as trace.json says)
//   model/            the initial weights; with an adapter, the weights below it as the model's files store them
//   adapter/          the initial adapter, of a run that has one, as peft stores it
//   checkpoints/      step-000010.safetensors: the trained parameters after step 10, Hugging Face names
#pragma once

#include <filesystem>
#include <optional>
#include <vector>

#include "espalier/base/json.h"
#include "espalier/checkpoint/atomic_output.h"
#include "espalier/options/options.h"
#include "espalier/rollout/writer.h"
#include "espalier/step/step.h"
#include "espalier/train/whole_values.h"

namespace espalier {

struct Trace {
  struct Step {
    std::int64_t step = 0;
    std::optional<double> loss, grad_norm;
  };
  struct Checkpoint {
    std::int64_t step = 0;
    std::filesystem::path file;
  };

  std::filesystem::path model, rollouts;
  std::filesystem::path adapter;        // empty: none
  std::int64_t positions = 0;           // positions of the run's rotary tables; 0: not recorded
  Options options;                      // of the recorded run
  std::vector<Step> steps;              // ascending
  std::vector<Checkpoint> checkpoints;  // ascending

  // Names the run's start in options of another run.
  void start(Options& given) const;
};

// Errors: InputError with the file and the member that is missing or wrong.
Trace read_trace(const std::filesystem::path& directory);

// Writes a trace while a run goes on; nothing is visible before finish(). Every rank has a recorder: rank 0 writes, the
// others give it their part of each tensor.
class TraceRecorder {
 public:
  // `every`: steps between checkpoints. Copies the initial weights, and the initial adapter. Model and optimizer must
  // outlive the object. Errors: OptionError for a directory that exists and is none of Espalier's, or cannot be
  // written.
  TraceRecorder(const std::filesystem::path& directory, std::int64_t every, const ModelState& model,
                const AdamW& optimizer, const Options& options);

  // After a step: its records, with the advantages that were used, and a checkpoint where one is due (always after the
  // `last`).
  void add(const StepReport& report, const MiniBatch& mini_batch, bool last);
  void finish();

 private:
  // On rank 0.
  struct Files {
    explicit Files(const std::filesystem::path& target);
    AtomicDirectory directory;
    RolloutWriter rollouts;
  };

  std::int64_t every_;
  const ModelState& model_;
  const AdamW& optimizer_;
  WholeValues whole_;
  Options options_;
  std::optional<Files> files_;
  Json steps_, checkpoints_;
};

}  // namespace espalier
