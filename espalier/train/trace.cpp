#include "espalier/train/trace.h"

#include <algorithm>
#include <cstdio>

#include "espalier/base/error.h"
#include "espalier/base/json.h"
#include "espalier/checkpoint/added_values.h"
#include "espalier/checkpoint/json_file.h"
#include "espalier/checkpoint/model_directory.h"
#include "espalier/options/options_json.h"
#include "espalier/train/trained_model.h"

namespace espalier {
namespace {

constexpr const char* kAdapter = "adapter";

[[noreturn]] void refuse(const std::string& where, const std::string& expected, const std::string& got) {
  throw InputError({where, expected, got, "traces are written by train or grpo with --record"});
}

// A file or folder named by a member, inside the trace.
std::filesystem::path path_member(const std::filesystem::path& directory, const Json& json, const char* member,
                                  const std::string& where) {
  const auto found = json.find(member);
  if (found == json.end() || !found->is_string()) refuse(where, text_of("\"", member, "\", a path"), "none");
  const std::filesystem::path relative = found->get<std::string>();
  if (relative.is_absolute() || relative.string().find("..") != std::string::npos)
    refuse(where, "a path inside the trace", relative.string());
  if (!std::filesystem::exists(directory / relative)) refuse((directory / relative).string(), "a file", "nothing");
  return directory / relative;
}

std::int64_t step_member(const Json& json, const std::string& where) {
  if (!json.is_object() || !json.contains("step") || !json["step"].is_number_integer() || json["step"] < 1)
    refuse(where, "\"step\", a number of at least 1", json.dump().substr(0, 80));
  return json["step"].get<std::int64_t>();
}

std::optional<double> number_member(const Json& json, const char* member) {
  const auto found = json.find(member);
  return found != json.end() && found->is_number() ? std::optional(found->get<double>()) : std::nullopt;
}

const Json& array_member(const Json& json, const char* member, const std::string& where) {
  const auto found = json.find(member);
  if (found == json.end() || !found->is_array()) refuse(where, text_of("\"", member, "\", an array"), "none");
  return *found;
}

}  // namespace

Trace read_trace(const std::filesystem::path& directory) {
  const std::filesystem::path file = directory / "trace.json";
  const std::string where = file.string();
  const Json json = read_json_object(file);
  Trace trace;
  trace.model = path_member(directory, json, "model", where);
  trace.rollouts = path_member(directory, json, "rollouts", where);
  if (json.contains("positions") && json["positions"].is_number_integer())
    trace.positions = json["positions"].get<std::int64_t>();
  if (json.contains(kAdapter)) trace.adapter = path_member(directory, json, kAdapter, where);
  try {
    trace.options = options_from_json(json.value("options", Json::object()), where);
    const Json dtype = json.value("dtype", Json("float32"));
    if (!dtype.is_string()) refuse(where, "\"dtype\", a name", dtype.type_name());
    trace.options.dtype = name_of(parse_dtype(dtype.get<std::string>()));
  } catch (const OptionError& error) {
    throw InputError(error.text());
  }
  for (const Json& step : array_member(json, "steps", where))
    trace.steps.push_back({step_member(step, where), number_member(step, "loss"), number_member(step, "grad_norm")});
  for (const Json& checkpoint : array_member(json, "checkpoints", where))
    trace.checkpoints.push_back({step_member(checkpoint, where), path_member(directory, checkpoint, "file", where)});
  std::ranges::sort(trace.steps, {}, &Trace::Step::step);
  std::ranges::sort(trace.checkpoints, {}, &Trace::Checkpoint::step);
  return trace;
}

void Trace::start(Options& given) const { given.model = model, given.adapter = adapter, given.resume.clear(); }

TraceRecorder::Files::Files(const std::filesystem::path& target)
    : directory(target), rollouts((directory.path() / "rollouts.jsonl.gz").string()) {}

namespace {

// A trace holds a quantised model as the numbers that its codes stand for: quantised once more they would be others.
Options recorded(Options options, const ModelShape& shape) {
  if (shape.stored_quantised.form.kind != quantised::Kind::none) options.weights = HeldWeights::source;
  return options;
}

}  // namespace

TraceRecorder::TraceRecorder(const std::filesystem::path& directory, std::int64_t every, const ModelState& model,
                             const AdamW& optimizer, const Options& options)
    : every_(every),
      model_(model),
      optimizer_(optimizer),
      whole_(model),
      options_(recorded(options, model.shape)),
      steps_(Json::array()),
      checkpoints_(Json::array()) {
  const ParameterValues masters = whole_.of(optimizer_.masters(), optimizer_);
  if (!model.mesh.writes()) {
    whole_.give(masters);
    return;
  }
  files_.emplace(directory);
  const std::filesystem::path folder = files_->directory.path();
  const DType accumulator = accumulator_of(model.dtype);
  if (model.shape.trained.added.exist()) {
    write_own_parameters(folder / "model", model);
    write_added_values(folder / kAdapter, model.shape, model.source.string(), whole_.table(), accumulator, masters,
                       accumulator);
  } else {
    write_changed_model(folder / "model", model, whole_, masters, accumulator);
  }
  std::filesystem::create_directory(folder / "checkpoints");
}

void TraceRecorder::add(const StepReport& report, const MiniBatch& mini_batch, bool last) {
  const std::int64_t step = static_cast<std::int64_t>(steps_.size()) + 1;
  steps_.push_back({{"step", step},
                    {"loss", report.gradient.loss.loss},
                    {"grad_norm", report.update.grad_norm},
                    {"lr", report.update.lr},
                    {"rollouts", mini_batch.rollouts.size()}});
  for (std::size_t i = 0; files_ && i < mini_batch.rollouts.size(); ++i) {
    Rollout rollout = mini_batch.rollouts[i];
    rollout.step = step;
    rollout.advantages = mini_batch.advantages[i];
    files_->rollouts.write(rollout);
  }
  if (step % every_ != 0 && !last) return;
  const ParameterValues masters = whole_.of(optimizer_.masters(), optimizer_);
  if (!files_) return whole_.give(masters);
  char name[64];
  std::snprintf(name, sizeof name, "checkpoints/step-%06lld.safetensors", static_cast<long long>(step));
  write_named_tensors(files_->directory.path() / name, {{"", whole_.table(), masters}}, accumulator_of(model_.dtype));
  checkpoints_.push_back({{"step", step}, {"file", name}});
}

void TraceRecorder::finish() {
  if (!files_) return;
  files_->rollouts.finish();
  Json json{{"format", "trace"}, {"version", 1}};
  json["recorder"] = "espalier --record";
  json["dtype"] = name_of(model_.dtype);
  json["positions"] = model_.decoder.positions();  // decides the factors of longrope
  json["model"] = "model";
  if (model_.shape.trained.added.exist()) json[kAdapter] = kAdapter;
  json["rollouts"] = "rollouts.jsonl.gz";
  json["options"] = options_to_json(options_, 't');
  json["steps"] = steps_;
  json["checkpoints"] = checkpoints_;
  write_json_file(files_->directory.path() / "trace.json", json);
  files_->directory.commit();
}

}  // namespace espalier
