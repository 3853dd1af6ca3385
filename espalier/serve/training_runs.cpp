#include "espalier/serve/training_runs.h"

namespace espalier::serve {

TrainingRun& TrainingRuns::add(const std::string& id) {
  TrainingRun& run = runs_[id];
  run.id = id;
  return run;
}

TrainingRun* TrainingRuns::find(const std::string& id) {
  const auto found = runs_.find(id);
  return found == runs_.end() ? nullptr : &found->second;
}

}  // namespace espalier::serve
