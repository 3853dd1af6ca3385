#include "espalier/services/tracker.h"

#include <filesystem>

#include "espalier/base/error.h"
#include "espalier/metrics/metric_tags.h"
#include "espalier/options/options_json.h"
#include "espalier/rollout/python_interpreter.h"

namespace espalier {
namespace {

constexpr int kTrackerPatience = 300'000;  // milliseconds; the last answer waits for the network

std::string settings_of(const Options& options, char verb) {
  const std::string& folder = options.out.empty() ? options.resume : options.out;
  return Json{{"name", std::filesystem::path(folder).filename().string()}, {"options", options_to_json(options, verb)}}
      .dump();
}

[[noreturn]] void fail(const Json& error, std::size_t) {
  if (error["kind"] == "package")
    throw UnsupportedError(
        {"--report-to wandb", "the Python package wandb in " + python_interpreter(), error["message"],
         python_interpreter() + " -m pip install wandb; or set ESPALIER_PYTHON to a Python that has it"});
  throw InputError(
      {"--report-to wandb", "a run of wandb", error["message"], "run `wandb login`, or set WANDB_MODE=offline"});
}

}  // namespace

ReportTargets ReportTargets::from(const Options& options) {
  ReportTargets out;
  std::string word;
  for (const char c : options.report_to + ",") {
    if (c != ',') {
      word += c;
      continue;
    }
    if (word == "tensorboard")
      out.tensorboard = true;
    else if (word == "wandb")
      out.wandb = true;
    else if (word != "none")
      throw OptionError(
          {"--report-to", "tensorboard, wandb, tensorboard,wandb or none", '"' + options.report_to + '"', ""});
    word.clear();
  }
  return out;
}

Tracker::Tracker(const Options& options, char verb, Progress& progress) : progress_(progress) {
  service_.emplace("tracker", settings_of(options, verb), kTrackerPatience, fail);
}

void Tracker::write(const Json& line) {
  Json scalars = Json::object();
  for_each_scalar(line, [&](const char* tag, double value) { scalars[tag] = value; });
  if (!scalars.empty())
    ask({{"kind", line.value("kind", "")}, {"step", line.value("step", std::int64_t{0})}, {"scalars", scalars}});
}

void Tracker::finish() { ask({{"finish", true}}); }

void Tracker::ask(const Json& request) {
  if (!service_) return;
  try {
    service_->ask(request.dump());
  } catch (const Error& error) {
    progress_.note(std::string("continuing without wandb: ") + error.what());
    service_.reset();
  }
}

}  // namespace espalier
