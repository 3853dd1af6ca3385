// The engine of the service: base models, and the models that clients tune over them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "espalier/hosting/hosted_base.h"
#include "espalier/hosting/hosted_sampler.h"
#include "espalier/hosting/tuned_model.h"
#include "espalier/serve/engine.h"

namespace espalier {

// "Qwen/Qwen3-8B=/models/q8" -> {"Qwen/Qwen3-8B", "/models/q8"}; a folder alone is its own name.
using NamedFolder = std::pair<std::string, std::filesystem::path>;

class Host final : public serve::Engine {
 public:
  // Loads the base models. Errors: as load_model; OptionError for two models of one name; MemoryBudgetError where
  // nothing is left for a step.
  Host(const std::vector<NamedFolder>& models, const Options& options, const MachineProfile& machine,
       Progress& progress);

  const std::vector<serve::BaseModel>& models() const override { return facts_; }
  void check_checkpoint(const std::string& base, const std::filesystem::path& folder, bool optimizer) const override;
  void begin_thread() override;
  void create(const std::string& run, const std::string& base, const serve::TunedPart& part,
              const serve::Pause& pause) override;
  void drop(const std::string& run) override;
  std::vector<serve::TrainingOutcome> forward_backward(const std::string& run,
                                                       const std::vector<const serve::TrainingCall*>& calls,
                                                       const serve::Pause& pause) override;
  void break_gradient(const std::string& run, const std::string& why, const serve::Pause& pause) override;
  bool has_gradient(const std::string& run) const override;
  std::map<std::string, double> optim_step(const std::string& run, const serve::AdamParams& params,
                                           const serve::Pause& pause) override;
  void save(const std::string& run, const std::filesystem::path& folder, serve::CheckpointKind kind,
            const std::string& description, const serve::Pause& pause) override;
  void load(const std::string& run, const std::string& base, const serve::TunedPart& part,
            const std::filesystem::path& folder, bool optimizer, const serve::Pause& pause) override;
  void open_sampler(const std::string& sampler, const serve::SamplerSource& source, const serve::Pause& pause) override;
  void fail_sampler(const std::string& sampler, std::exception_ptr error) override;
  void close_sampler(const std::string& sampler) override;
  void add_sample(const std::string& sampler, std::int64_t ticket, const serve::SampleCall& call,
                  serve::SampleDone done, const serve::Pause& pause) override;
  void cancel_sample(std::int64_t ticket) override;
  bool step_samples() override;

 private:
  struct Sampler {
    serve::SamplerSource source;
    std::unique_ptr<HostedSampler> live;  // null: its weights are in the folder alone
    std::uint64_t last_used = 0;
    std::exception_ptr failed;  // why it cannot be used
  };

  struct Run {
    HostedBase& base;
    serve::TunedPart part;
    std::shared_ptr<TunedModel> live;  // null: its state is in its folder alone; shared with the code that writes it
    std::uint64_t last_used = 0;
    std::filesystem::path parked;  // that folder
  };
  // Bytes of a model that is not among the runs yet.
  struct Loading {
    explicit Loading(std::int64_t& of_all, std::int64_t own) : sum(of_all), bytes(own) { sum += bytes; }
    ~Loading() { sum -= bytes; }
    Loading(const Loading&) = delete;
    Loading& operator=(const Loading&) = delete;

    std::int64_t &sum, bytes;
  };

  void add_run(const std::string& run, HostedBase& base, std::shared_ptr<TunedModel> model);
  TunedModel& run_of(const std::string& run, const serve::Pause& pause);
  // Writes the state of the run that was used the longest ago and has no gradient, and frees its memory, unless it was
  // used meanwhile. False: there is none.
  bool park_idle_run(const serve::Pause& pause);
  // For the bytes of a tuned model, while it is made. Refuses one for which there is no memory, after idle samplers and
  // models have given up theirs.
  std::unique_ptr<Loading> make_room(const HostedBase& base, const serve::TunedPart& part, const serve::Pause& pause);
  HostedSampler& live(Sampler& sampler, const serve::Pause& pause);
  // The limit of one sampler: what the others have not been promised.
  std::int64_t kv_bytes_of(const HostedSampler& sampler) const;
  std::int64_t tuned_bytes() const;  // of all models and samplers, and of models that are being loaded
  bool drop_idle_sampler();
  bool step_all_samplers();

  std::map<std::string, std::unique_ptr<HostedBase>> bases_;
  std::vector<serve::BaseModel> facts_;
  std::unique_ptr<Hosting> hosting_;
  std::map<std::string, Run> runs_;
  std::map<std::string, Sampler> samplers_;
  std::uint64_t clock_ = 0;
  std::int64_t loading_bytes_ = 0;
  std::int64_t parking_ = 0;  // runs that are being written to disk
  double decoding_ends_ = 0;  // not before this time, where memory was moved for it
};

std::vector<NamedFolder> named_folders(const std::string& options);

}  // namespace espalier
