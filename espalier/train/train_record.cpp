#include "espalier/train/train_record.h"

#include <algorithm>
#include <chrono>
#include <ctime>
#include <fstream>

#include "espalier/checkpoint/json_file.h"
#include "espalier/metrics/metrics.h"
#include "espalier/options/options_json.h"
#include "espalier/services/tracker.h"
#include "espalier/step/step_json.h"
#include "espalier/train/step_statistics.h"

namespace espalier {
namespace {

constexpr const char* kMetrics = "metrics.jsonl";

}  // namespace

std::string utc_now() {
  const std::time_t seconds = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  char text[32];
  std::tm parts{};
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&seconds, &parts));
  return text;
}

Json shape_json(const ModelShape& shape) {
  Json json{{"architecture", shape.architecture}, {"layers", shape.layers()},       {"hidden", shape.hidden},
            {"inner", shape.layer.front().inner}, {"vocabulary", shape.vocabulary}, {"experts", shape.experts},
            {"parameters", shape.parameters()}};
  for (const LayerShape& layer : shape.layer) layer.mixer->report(json);
  return json;
}

TrainRecord::TrainRecord(const std::filesystem::path& resumed, std::int64_t step) : started_(utc_now()) {
  if (resumed.empty()) return;
  std::ifstream former(resumed / "espalier" / kMetrics);
  for (std::string text; std::getline(former, text);) {
    Json line = Json::parse(text, nullptr, false);
    if (line.is_object() && line.value("step", step + 1) <= step) lines_.push_back(std::move(line));
  }
}

const Json& TrainRecord::add(const StepReport& report, const MiniBatch& mini_batch, std::int64_t steps_total,
                             const MachineProfile& machine) {
  Json line{{"kind", "step"}};
  line.update(step_json(report));
  line.update(step_statistics(report, mini_batch.rollouts, machine));
  line["steps_total"] = steps_total;
  double tokens = 0;
  std::int32_t longest = 0;
  for (const Rollout& rollout : mini_batch.rollouts) {
    tokens += rollout.response_length();
    longest = std::max(longest, rollout.response_length());
  }
  const auto count = static_cast<double>(mini_batch.rollouts.size());
  line["length"] = {{"mean", tokens / count}, {"max", longest}};
  return lines_.emplace_back(std::move(line));
}

void TrainRecord::write(const std::filesystem::path& directory, const Options& options, const ModelShape& shape,
                        const MachineProfile& machine) const {
  const std::filesystem::path folder = directory / "espalier";
  write_json_file(folder / "run.json", {{"espalier", ESPALIER_VERSION},
                                        {"verb", "train"},
                                        {"started", started_},
                                        {"machine", {{"threads", options.threads}, {"name", machine.name}}},
                                        {"model", shape_json(shape)},
                                        {"options", options_to_json(options, 't')}});
  RunMetrics metrics(folder / kMetrics, 0, 0, {}, ReportTargets::from(options).tensorboard);
  for (const Json& line : lines_) metrics.write(line);
}

}  // namespace espalier
