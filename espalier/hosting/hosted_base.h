// A base model: its frozen weights, loaded once, over which any number of adapters train and sample.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "espalier/forecast/cost_model.h"
#include "espalier/options/options.h"
#include "espalier/step/model_state.h"
#include "espalier/step/workspace.h"

namespace espalier {

// The settings and the memory that all models of the process share.
struct Hosting {
  Hosting(const Options& run_options, const MachineProfile& machine_profile, std::int64_t bytes_of_a_step)
      : options(run_options), machine(machine_profile), step_bytes(bytes_of_a_step), workspace(bytes_of_a_step) {}

  Options options;
  MachineProfile machine;
  std::int64_t step_bytes;  // of activations: the same for every call, so that its plan does not depend on other models
  Workspace workspace;      // passes take turns
};

class HostedBase {
 public:
  // Errors: as load_model.
  HostedBase(std::string name, const std::filesystem::path& folder, const Options& options, Progress& progress);

  const std::string& name() const { return name_; }
  const ModelState& model() const { return *model_; }

  // Lets rows of `decoder`, this model's or one of its adapters', have positions below `positions`.
  void reserve_positions(Decoder& decoder, std::int64_t positions);

 private:
  std::string name_;
  std::unique_ptr<ModelState> model_;
};

}  // namespace espalier
