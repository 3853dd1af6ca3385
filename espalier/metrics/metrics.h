// A run's metrics: every line goes to metrics.jsonl, to TensorBoard and to the program.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>

#include "espalier/base/json.h"
#include "espalier/metrics/event_file.h"
#include "espalier/metrics/run_log.h"

namespace espalier {

// An object with "kind" and "step".
using MetricLine = std::function<void(const Json& line)>;

class RunMetrics {
 public:
  // Without `tensorboard` there are no event files. Continues behind the first `bytes` of `file`, which is cut there.
  // Replaces TensorBoard's events from `first_step` on. Errors: InputError where the file is shorter; OptionError.
  RunMetrics(const std::filesystem::path& file, std::int64_t bytes, std::int64_t first_step, MetricLine watcher,
             bool tensorboard = true);

  void write(const Json& line);
  std::int64_t bytes() const;  // of metrics.jsonl

 private:
  std::filesystem::path file_;
  RunLog log_;
  std::optional<EventFile> events_;
  MetricLine watcher_;
};

}  // namespace espalier
