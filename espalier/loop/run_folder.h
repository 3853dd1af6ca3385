// A run on disk:
//
//   run.json            version, machine, options, model shape, start
//   metrics.jsonl       one object a line: warm_start, step, evaluation, sample, picture
//   events.out.tfevents.*  the same numbers for TensorBoard
//   fresh/              config.json and tokenizer of a fresh model
//   checkpoints/warm-start/   of an interrupted warm start, until it is over
//   checkpoints/step-000010/  a Hugging Face directory; espalier/ in it holds the state for exact continuation
//   last_rollouts.jsonl the records of the last batch before the newest checkpoint
//   model/              the trained model
//
// Every file and directory but the two logs is complete or absent; the logs are cut back to the checkpoint that a run
// continues from.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>

#include "espalier/base/json.h"
#include "espalier/options/options.h"

namespace espalier {

class RunFolder {
 public:
  // Creates `root`, or takes the run that it holds, and locks it until the object's end. Errors: OptionError where it
  // holds something else, cannot be written, or another process works on it.
  explicit RunFolder(const std::filesystem::path& root);
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;
  ~RunFolder();

  // The same run, which rank 0 has locked, for a rank that only reads it.
  static std::unique_ptr<RunFolder> seen_by_rank(const std::filesystem::path& root);

  static bool is_run(const std::filesystem::path& root);  // it holds run.json

  const std::filesystem::path& root() const { return root_; }
  std::filesystem::path metrics() const { return root_ / "metrics.jsonl"; }
  std::filesystem::path fresh() const { return root_ / "fresh"; }
  std::filesystem::path model() const { return root_ / "model"; }
  std::filesystem::path last_rollouts() const { return root_ / "last_rollouts.jsonl"; }
  std::filesystem::path warm_start() const { return root_ / "checkpoints" / "warm-start"; }
  std::filesystem::path checkpoint(std::int64_t step) const;
  std::optional<std::int64_t> newest_checkpoint() const;  // the step of the last complete one

  bool has_progress() const;  // a checkpoint, or a warm start that was interrupted
  void clear() const;         // removes the run, for another one to start here

  void write_description(const Json& run) const;  // run.json
  Json description() const;                       // Errors: InputError

 private:
  RunFolder() = default;

  std::filesystem::path root_;
  int lock_ = -1;
};

// The options of a continued run: the original ones, overridden by options in `given` that are not defaults. Only
// options that do not affect the results so far may change (--steps, --show, how often to save and evaluate, ...).
// Errors: OptionError naming an option that may not change.
Options continued_options(const Options& given, const Json& recorded, const std::string& where);

}  // namespace espalier
