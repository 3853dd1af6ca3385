// A sampler of the service: weights that never change, and the machine that decodes responses with them.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "espalier/generate/decoding.h"
#include "espalier/hosting/hosted_base.h"
#include "espalier/serve/sample_calls.h"
#include "espalier/services/tokenizer.h"

namespace espalier {

class HostedSampler {
 public:
  // `weights`: a tuned model's; null: the base model's own. `base` and `hosting` must outlive the object.
  HostedSampler(HostedBase& base, Hosting& hosting, std::unique_ptr<ModelState> weights);

  using Done = std::function<void(const serve::SampleAnswer* answer, std::exception_ptr error)>;
  // `done` is called once, by step(), cancel() or the object's end. Errors: MemoryBudgetError for a call whose keys and
  // values can never fit; a tokenizer's errors for texts that stop.
  void add(std::int64_t ticket, const serve::SampleCall& call, Done done);
  // One token more for every live response.
  void step();
  bool idle() const { return calls_.empty(); }
  HostedBase& base() const { return base_; }
  std::int64_t weight_bytes() const { return weights_ ? static_cast<std::int64_t>(weights_->weights.nbytes()) : 0; }
  // Ends the call with an error; false: it is not here.
  bool cancel(std::int64_t ticket);
  // Gives up the rows of prompts that are kept for later, if nothing is live.
  void forget() {
    if (idle()) decoding_.reset();
  }
  // Ends all calls with this error.
  void fail(std::exception_ptr error);

  // Bytes of keys and values that may come to be held for what is live, and of those that are kept for later.
  std::int64_t held_bytes() const { return decoding_ ? decoding_->promised_bytes() : 0; }
  void set_kv_bytes(std::int64_t bytes) { kv_bytes_ = bytes; }

 private:
  struct Call {
    serve::SampleCall request;
    Done done;
    std::shared_ptr<PromptReading> reading;
    std::vector<std::size_t> edge_of_target;  // of the reading
    std::vector<std::int64_t> responses;      // the machine's numbers
    std::int64_t left = 0;                    // that have not ended
    serve::SampleAnswer answer;
    std::unique_ptr<StopStrings> stops;
  };
  Decoder& decoder();
  Decoding& decoding();
  void read_prompt(Call& call);
  void take(Call& call, std::size_t sample, std::int64_t number);
  void finish_reading(Call& call) const;
  void require_room(const serve::SampleCall& request) const;

  HostedBase& base_;
  Hosting& hosting_;
  std::unique_ptr<ModelState> weights_;
  std::map<std::int64_t, std::unique_ptr<Call>> calls_;       // by ticket
  std::map<std::int64_t, std::pair<Call*, std::size_t>> of_;  // calls and samples by the machine's numbers
  std::int64_t kv_bytes_ = 0;
  std::unique_ptr<Decoding> decoding_;  // dies before the weights that it reads
};

}  // namespace espalier
