// The engine behind the service: what the front calls on the engine's thread. The front knows no tensors.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "espalier/serve/calls.h"

namespace espalier::serve {

// Facts of a base model that never change. Any thread may read them.
struct BaseModel {
  std::string name;    // what clients call it
  std::string folder;  // its directory, where the tokenizer is
  std::string architecture;
  std::int64_t vocabulary = 0, context = 0;  // token ids; positions
};

// Errors are those of the engine (base/error.h): the caller's mistake, or the server's own. A call that throws has
// changed nothing, except where it says so.
class Engine {
 public:
  virtual ~Engine() = default;

  virtual const std::vector<BaseModel>& models() const = 0;  // any thread

  // The rest: the engine's thread alone, begin_thread first. `run` names a training model.
  virtual void begin_thread() = 0;
  virtual void create(const std::string& run, const std::string& base, const LoraConfig& lora) = 0;
  virtual void drop(const std::string& run) = 0;

  // Adds the gradient of the summed loss to the run's, if the call goes backward. An error of such a call breaks the
  // gradient.
  virtual TrainingAnswer forward_backward(const std::string& run, const TrainingCall& call) = 0;
  // A call that never reached the engine: the gradient lacks its part, and the next optimizer step is refused.
  virtual void break_gradient(const std::string& run, const std::string& why) = 0;
  // Takes a step with the gradient, which is then zero. A broken gradient is dropped without a step, with an error.
  virtual std::map<std::string, double> optim_step(const std::string& run, const AdamParams& params) = 0;
};

}  // namespace espalier::serve
