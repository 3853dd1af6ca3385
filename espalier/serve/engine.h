// The engine behind the service: what the front calls on the engine's thread. The front knows no tensors.
#pragma once

#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "espalier/serve/calls.h"
#include "espalier/serve/names.h"
#include "espalier/serve/sample_calls.h"

namespace espalier::serve {

// States of models that an engine has put aside to free memory, in the server's folder; of no use to a next server.
inline constexpr const char* kParked = "parked";

// Facts of a base model that never change. Any thread may read them.
struct BaseModel {
  std::string name;      // what clients call it
  std::string folder;    // its directory, where the tokenizer is
  std::string identity;  // the same for the same weights, wherever they lie
  std::string architecture;
  std::int64_t vocabulary = 0, context = 0;  // token ids; positions
};

struct TrainingOutcome {
  TrainingAnswer answer;
  std::exception_ptr error;  // null: there is an answer
};

// The weights of a sampler: what a run has now, a checkpoint's, or the base model's own. With a run the folder holds
// the same weights, so that they need not stay in memory.
struct SamplerSource {
  std::string base;
  std::optional<std::string> run;
  std::optional<std::filesystem::path> folder;
  TunedPart part;  // of the run or the checkpoint
};

// Lets others have their turn on the engine's thread.
using Pause = std::function<void()>;

// Called once, on the engine's thread: an answer, or an error.
using SampleDone = std::function<void(const SampleAnswer* answer, std::exception_ptr error)>;

// Errors come from the engine (base/error.h): the caller's mistake, or the server's own. A call that throws has
// changed nothing, except where it says so.
class Engine {
 public:
  virtual ~Engine() = default;

  // These two: any thread.
  virtual const std::vector<BaseModel>& models() const = 0;
  // Errors: InputError with the file, if a checkpoint of this base model is damaged; without `optimizer` its weights
  // alone. Values are not read.
  virtual void check_checkpoint(const std::string& base, const std::filesystem::path& folder, bool optimizer) const = 0;

  // The rest: the engine's thread alone, begin_thread first. (Threads that have it in turns count as one.) `run` names
  // a training model. `pause` is called between parts of the work, of bounded rows or tensors: whatever else the engine
  // has to do may be done in it, except for calls of this run, and what it throws ends the call;
  // nor, in a pause of add_sample, may this sampler be used.
  virtual void begin_thread() = 0;
  virtual void create(const std::string& run, const std::string& base, const TunedPart& part, const Pause& pause) = 0;
  virtual void drop(const std::string& run) = 0;

  // The answer to each call, in order, or its error. Calls that go backward add the gradients of their summed losses to
  // the run's; the error of such a call breaks the gradient. Several calls, all of which go backward, run as one, so
  // that they share what their data have in common; one that fails does not keep the others from it.
  virtual std::vector<TrainingOutcome> forward_backward(const std::string& run,
                                                        const std::vector<const TrainingCall*>& calls,
                                                        const Pause& pause) = 0;
  // A call that never reached the engine: the gradient lacks its part, and the next optimizer step is refused.
  virtual void break_gradient(const std::string& run, const std::string& why, const Pause& pause) = 0;
  // False: the run is all that save writes. True: calls, or the wreck of them, wait for a step.
  virtual bool has_gradient(const std::string& run) const = 0;
  // Takes a step with the gradient, which is then zero. A broken gradient is dropped without a step, with an error.
  virtual std::map<std::string, double> optim_step(const std::string& run, const AdamParams& params,
                                                   const Pause& pause) = 0;

  // Writes what the run has now into a folder that is complete or absent; `description` becomes its file kDescription.
  virtual void save(const std::string& run, const std::filesystem::path& folder, CheckpointKind kind,
                    const std::string& description, const Pause& pause) = 0;
  // The run becomes, or is created as, what a checkpoint holds; its gradient is zero. Without `optimizer` the moments
  // and the count of steps begin anew. A run stays as it was if check_checkpoint finds an error.
  virtual void load(const std::string& run, const std::string& base, const TunedPart& part,
                    const std::filesystem::path& folder, bool optimizer, const Pause& pause) = 0;

  // Weights that later steps of their run do not change.
  virtual void open_sampler(const std::string& sampler, const SamplerSource& source, const Pause& pause) = 0;
  // A sampler whose weights could not be had: its samples end with this error.
  virtual void fail_sampler(const std::string& sampler, std::exception_ptr error) = 0;
  virtual void close_sampler(const std::string& sampler) = 0;
  // `ticket` is the caller's name of the sample. `done` is called by step_samples, cancel_sample or close_sampler,
  // unless add_sample throws.
  virtual void add_sample(const std::string& sampler, std::int64_t ticket, const SampleCall& call, SampleDone done,
                          const Pause& pause) = 0;
  virtual void cancel_sample(std::int64_t ticket) = 0;
  // One token more for every live sample. False: there is none.
  virtual bool step_samples() = 0;
};

}  // namespace espalier::serve
