// Writing and checking the two files of a run state.
#include "espalier/checkpoint/run_state.h"

#include <sys/stat.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <utility>

#include "espalier/base/atomic_file.h"
#include "espalier/base/error.h"
#include "espalier/checkpoint/json_file.h"
#include "espalier/checkpoint/safetensors.h"
#include "espalier/model/parameters.h"

namespace espalier {
namespace fs = std::filesystem;
namespace {

constexpr const char* kFormat = "espalier-state";
constexpr std::int64_t kVersion = 1;
constexpr std::array<const char*, 3> kParts = {"master.", "exp_avg.", "exp_avg_sq."};
constexpr const char* kDamaged = "The checkpoint is damaged; continue from another one";

// Typed access to the members of state.json.
class StateReader {
 public:
  explicit StateReader(fs::path path) : path_(std::move(path)) {
    std::error_code ignored;
    if (!fs::exists(path_, ignored))
      throw InputError({path_.string(), "a checkpoint to continue from", "no such file",
                        "Name the --out directory of an earlier run"});
    json_ = read_json_object(path_);
  }

  std::string text(const char* member) const {
    const Json& value = at(member);
    if (!value.is_string()) fail(member, "a text", value.type_name());
    return value.get<std::string>();
  }

  std::int64_t count(const char* member) const {
    const Json& value = at(member);
    if (!value.is_number_integer() || value.get<std::int64_t>() < 0)
      fail(member, "a whole number from 0 on", value.is_number() ? value.dump() : value.type_name());
    return value.get<std::int64_t>();
  }

  // Checkpoints of runs without NCCL have none.
  std::optional<SumOrder> sum_order(const char* member) const {
    const auto found = json_.find(member);
    if (found == json_.end() || found->is_null()) return std::nullopt;
    if (!found->is_object()) fail(member, "an object", found->type_name());
    SumOrder out;
    for (const auto& [name, value] : found->items()) {
      if (!value.is_string()) fail(member, "texts", value.type_name());
      out[name] = value.get<std::string>();
    }
    return out;
  }

  std::string object(const char* member) const {
    const Json& value = at(member);
    if (!value.is_object()) fail(member, "an object", value.type_name());
    return value.dump();
  }

  DType dtype(const char* member) const {
    const std::string name = text(member);
    for (const DType dtype : {DType::float64, DType::float32, DType::bfloat16})
      if (name == name_of(dtype)) return dtype;
    fail(member, "float64, float32 or bfloat16", "'" + printable(name) + "'");
  }

  [[noreturn]] void fail(const char* member, const std::string& expected, const std::string& got,
                         const char* remedy = kDamaged) const {
    throw InputError({path_.string() + ": " + member, expected, got, remedy});
  }

 private:
  const Json& at(const char* member) const {
    const auto found = json_.find(member);
    if (found == json_.end()) fail(member, "this member", "none");
    return *found;
  }

  fs::path path_;
  Json json_;
};

Json parsed_object(const std::string& text, const char* what) {
  Json value = Json::parse(text, nullptr, false);
  ESPALIER_INTERNAL(value.is_object(), what, " of a run state is no JSON object");
  return value;
}

const SafetensorsEntry& checked_entry(const SafetensorsFile& file, const std::string& name, const Parameter& parameter,
                                      TensorType type) {
  const SafetensorsEntry* entry = file.find(name);
  const std::string where = file.path().string() + ": tensor '" + name + "'";
  if (entry == nullptr) throw InputError({where, "this tensor", "none", kDamaged});
  if (entry->type != type || entry->shape != parameter.shape)
    throw InputError({where, text_of(name_of(type), " ", shape_text(parameter.shape)),
                      text_of(name_of(entry->type), " ", shape_text(entry->shape)), kDamaged});
  return *entry;
}

// A fingerprint without the words of --train, and these.
std::pair<std::string, std::string> parts_of(const std::string& fingerprint) {
  const std::size_t at = fingerprint.rfind(kFingerprintTrain);
  if (at == std::string::npos) return {fingerprint, "all"};
  return {fingerprint.substr(0, at), fingerprint.substr(at + kFingerprintTrain.size())};
}

}  // namespace

void save_run_state(const fs::path& directory, const RunState& state, const ParameterTable& table, const void* masters,
                    const void* first_moments, const void* second_moments) {
  const std::int64_t bytes = bytes_of(state.accumulators);
  save_run_state(directory, state, table,
                 {values_of(masters, bytes), values_of(first_moments, bytes), values_of(second_moments, bytes)});
}

void save_run_state(const fs::path& directory, const RunState& state, const ParameterTable& table,
                    const RunStateValues& parts) {
  const fs::path folder = directory / "espalier";
  if (::mkdir(folder.c_str(), 0777) != 0 && errno != EEXIST) throw_output_error(folder, "create this directory", errno);
  ESPALIER_INTERNAL(state.accumulators != DType::bfloat16, "masters and moments are float32 or float64");

  const TensorType type = tensor_type_of(state.accumulators);
  std::vector<TensorSpec> specs;
  for (const char* part : kParts)
    for (const Parameter& parameter : table.parameters())
      specs.push_back({part + parameter.name, type, parameter.shape});
  OutputFile output(folder / "state.safetensors");
  SafetensorsWriter writer(output, specs, {{"format", "pt"}, {"step", std::to_string(state.step)}});
  for (const ParameterValues& values : parts)
    for (const Parameter& parameter : table.parameters())
      writer.append(values(parameter), parameter.count * bytes_of(state.accumulators));
  writer.finish();
  output.close_synced();

  Json json;
  json["format"] = kFormat;
  json["version"] = kVersion;
  json["step"] = state.step;
  json["epoch"] = state.epoch;
  json["mini_batch"] = state.mini_batch;
  json["model"] = state.model;
  json["dtype"] = name_of(state.dtype);
  json["accumulators"] = name_of(state.accumulators);
  json["random_state"] = state.random_state;
  if (state.sum_order) json["nccl"] = *state.sum_order;
  json["options"] = parsed_object(state.options, "options");
  json["extra"] = parsed_object(state.extra, "extra");
  write_json_file(folder / "state.json", json);
}

RunState read_run_state(const fs::path& directory) {
  const StateReader json(directory / "espalier" / "state.json");
  if (json.text("format") != kFormat) json.fail("format", kFormat, "'" + printable(json.text("format")) + "'");
  if (const std::int64_t version = json.count("version"); version != kVersion)
    json.fail("version", std::to_string(kVersion), std::to_string(version),
              "The checkpoint was written by another version of Espalier; continue with that one");
  RunState state;
  state.step = json.count("step");
  state.epoch = json.count("epoch");
  state.mini_batch = json.count("mini_batch");
  state.model = json.text("model");
  state.dtype = json.dtype("dtype");
  state.accumulators = json.dtype("accumulators");
  state.random_state = json.text("random_state");
  state.sum_order = json.sum_order("nccl");
  state.options = json.object("options");
  state.extra = json.object("extra");
  return state;
}

RunState load_run_state(const fs::path& directory, const std::string& model, const ParameterTable& table,
                        DType accumulators, void* masters, void* first_moments, void* second_moments) {
  const std::array<void*, 3> targets = {masters, first_moments, second_moments};
  const std::int64_t bytes = bytes_of(accumulators);
  return load_run_state(directory, model, table, accumulators,
                        [&](std::size_t part, const Parameter& parameter, const std::byte* values) {
                          std::memcpy(static_cast<std::byte*>(targets[part]) + parameter.offset * bytes, values,
                                      static_cast<std::size_t>(parameter.count * bytes));
                        });
}

RunState load_run_state(const fs::path& directory, const std::string& model, const ParameterTable& table,
                        DType accumulators, const TakeStateValues& take) {
  RunState state = read_run_state(directory);
  const fs::path folder = directory / "espalier";
  const std::string where = (folder / "state.json").string();
  const auto [shape_before, train_before] = parts_of(state.model);
  const auto [shape_now, train_now] = parts_of(model);
  if (shape_before == shape_now && train_before != train_now)
    throw InputError({where + ": trained parameters", "--train " + train_before, "--train " + train_now,
                      "Leave --train out to continue, or start a new run from --model " + directory.string()});
  if (state.model != model)
    throw InputError({where + ": model", model, state.model, "Continue with the model that made the checkpoint"});
  if (state.accumulators != accumulators)
    throw InputError({where + ": accumulators", name_of(accumulators), name_of(state.accumulators),
                      "Continue with the --dtype of the interrupted run"});

  const SafetensorsFile file(folder / "state.safetensors");
  const auto step = file.metadata().find("step");
  if (step == file.metadata().end() || step->second != std::to_string(state.step))
    throw InputError({file.path().string(), text_of("masters and moments after step ", state.step),
                      step == file.metadata().end() ? "no step" : "step " + printable(step->second), kDamaged});
  if (file.entries().size() != 3 * table.parameters().size())
    throw InputError({file.path().string(), text_of(3 * table.parameters().size(), " tensors"),
                      std::to_string(file.entries().size()), kDamaged});
  std::vector<const SafetensorsEntry*> entries;
  for (const char* part : kParts)
    for (const Parameter& parameter : table.parameters())
      entries.push_back(&checked_entry(file, part + parameter.name, parameter, tensor_type_of(accumulators)));
  std::size_t next = 0;
  for (std::size_t part = 0; part < kParts.size(); ++part)
    for (const Parameter& parameter : table.parameters()) take(part, parameter, entries[next++]->data);
  return state;
}

}  // namespace espalier
