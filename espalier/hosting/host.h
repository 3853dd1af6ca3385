// The engine of the service: base models, and the adapters that clients train over them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "espalier/hosting/hosted_base.h"
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
  void begin_thread() override;
  void create(const std::string& run, const std::string& base, const serve::LoraConfig& lora) override;
  void drop(const std::string& run) override { runs_.erase(run); }
  serve::TrainingAnswer forward_backward(const std::string& run, const serve::TrainingCall& call) override;
  void break_gradient(const std::string& run, const std::string& why) override;
  std::map<std::string, double> optim_step(const std::string& run, const serve::AdamParams& params) override;

 private:
  TunedModel& run_of(const std::string& run);

  std::map<std::string, std::unique_ptr<HostedBase>> bases_;
  std::vector<serve::BaseModel> facts_;
  std::unique_ptr<Hosting> hosting_;
  std::map<std::string, std::unique_ptr<TunedModel>> runs_;
};

std::vector<NamedFolder> named_folders(const std::string& options);

}  // namespace espalier
