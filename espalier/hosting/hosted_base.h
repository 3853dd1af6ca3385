// A base model: its frozen weights, loaded once, over which any number of tuned models train and sample.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "espalier/forecast/cost_model.h"
#include "espalier/hosting/call_memory.h"
#include "espalier/options/options.h"
#include "espalier/services/tokenizer.h"
#include "espalier/state/model_state.h"

namespace espalier {

// The settings and the memory that all models of the process share.
struct Hosting {
  // `left`: bytes beside the weights of all base models.
  Hosting(const Options& run_options, const MachineProfile& machine_profile, std::int64_t left)
      : options(run_options),
        machine(machine_profile),
        kv_bytes(left / 4),
        tuned_bytes(left / 4),
        check_every(run_options.check_every),
        raw_logprobs(run_options.sampled_logprobs == SampledLogprobs::raw),
        calls(left / 2, run_options.spill_dir.empty() ? run_options.state : run_options.spill_dir) {}

  Options options;
  MachineProfile machine;
  std::int64_t kv_bytes;     // of keys and values of all samplers
  std::int64_t tuned_bytes;  // of trained parts, their gradients and optimizers, and of the weights of samplers
  std::int64_t check_every;  // calls after which one runs without sharing, too; 0: never
  bool raw_logprobs;         // of samples: at temperature 1, whatever the temperature is
  CallMemory calls;          // of activations: the same for every call, whatever else the server holds
};

class HostedBase {
 public:
  // Errors: as load_model.
  HostedBase(std::string name, const std::filesystem::path& folder, const Options& options, Progress& progress);

  const std::string& name() const { return name_; }
  const ModelState& model() const { return *model_; }
  Decoder& decoder() { return model_->decoder; }
  // Tokens that end a response: eos_token_id of the model, and the tokenizer's eos token.
  const std::vector<std::int32_t>& end_tokens() const { return end_tokens_; }
  // For texts that stop a sample. Errors: as Tokenizer.
  Tokenizer& tokenizer() { return tokenizer_.get(); }
  // Keeps the weights as the kernels of small steps read them, while somebody samples.
  void hold_weights(bool hold);

  // Lets rows of `decoder`, this model's or that of a model tuned over it, have positions below `positions`.
  void reserve_positions(Decoder& decoder, std::int64_t positions);

 private:
  std::string name_;
  std::unique_ptr<ModelState> model_;
  std::vector<std::int32_t> end_tokens_;
  LazyTokenizer tokenizer_;
  std::shared_ptr<void> held_;
};

}  // namespace espalier
