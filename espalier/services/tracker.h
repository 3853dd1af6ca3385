// Metrics to Weights & Biases (--report-to wandb), through a Python process that stays
// (python/espalier/texts/tracker.py).
#pragma once

#include <optional>
#include <string>

#include "espalier/base/json.h"
#include "espalier/metrics/progress.h"
#include "espalier/options/options.h"
#include "espalier/services/python_service.h"

namespace espalier {

// Where metrics go beside metrics.jsonl. Errors: OptionError for a word that is neither.
struct ReportTargets {
  bool tensorboard = false, wandb = false;

  static ReportTargets from(const Options& options);
};

class Tracker {
 public:
  // Starts a run with the resolved options as its configuration. Project and mode follow wandb's own variables
  // (WANDB_PROJECT, by default "espalier"; WANDB_MODE=offline). Errors: UnsupportedError where the package is missing;
  // InputError with wandb's message where a run cannot start.
  Tracker(const Options& options, char verb, Progress& progress);

  // Logs the scalars of a line of metrics.jsonl (metrics/metric_tags.h). A process that fails is dropped with one
  // note: training goes on.
  void write(const Json& line);
  // Waits until everything was handed over.
  void finish();

 private:
  void ask(const Json& request);

  Progress& progress_;
  std::optional<PythonService> service_;
};

}  // namespace espalier
