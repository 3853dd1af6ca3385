// Files that `train` writes beside its model to show the run: OUT/espalier/run.json, metrics.jsonl and
// TensorBoard events, as in the folder of a grpo run (docs/run_folder.md).
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "espalier/base/json.h"
#include "espalier/forecast/cost_model.h"
#include "espalier/options/options.h"
#include "espalier/shape/model_shape.h"
#include "espalier/step/step.h"

namespace espalier {

// Fields of run.json that describe the model.
Json shape_json(const ModelShape& shape);

// The present time in UTC: "2026-01-31T13:00:00Z".
std::string utc_now();

class TrainRecord {
 public:
  // Begins with the lines of metrics.jsonl up to `step` of the run in `resumed` (empty: none).
  TrainRecord(const std::filesystem::path& resumed, std::int64_t step);

  // The line of a step of `steps_total`: step_json, step_statistics, and `length` over the rollouts of its mini-batch.
  const Json& add(const StepReport& report, const MiniBatch& mini_batch, std::int64_t steps_total,
                  const MachineProfile& machine);

  // Into `directory`/espalier.
  void write(const std::filesystem::path& directory, const Options& options, const ModelShape& shape,
             const MachineProfile& machine) const;

 private:
  std::string started_;
  std::vector<Json> lines_;
};

}  // namespace espalier
