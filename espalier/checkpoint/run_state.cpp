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
constexpr std::string_view kTrain = " train=";
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
  const std::size_t at = fingerprint.rfind(kTrain);
  if (at == std::string::npos) return {fingerprint, "all"};
  return {fingerprint.substr(0, at), fingerprint.substr(at + kTrain.size())};
}

}  // namespace

namespace {

void append_scaling(const char* name, const RopeScaling& s, std::ostream& out) {
  out << name << s.factor << "," << s.low_freq_factor << "," << s.high_freq_factor << ","
      << s.original_max_position_embeddings;
  if (s.type == RopeType::llama3) return;
  out << ",type" << static_cast<int>(s.type) << "," << s.attention_factor << "," << s.beta_fast << "," << s.beta_slow
      << "," << s.truncate;
  for (const double factor : s.short_factor) out << "," << factor;
}

void append_layers(const char* name, const std::vector<std::uint8_t>& layers, std::ostream& out) {
  out << name;
  for (const std::uint8_t layer : layers) out << (layer != 0 ? '1' : '0');
}

// What only some families have; nothing for the others.
void append_further(const ModelShape& s, std::ostream& out) {
  if (s.has_window_rope) {
    append_layers(" window_rope_layers=", s.window_layer, out);
    out << " window_rope_theta=" << s.window_rope.theta;
    if (s.window_rope.has_scaling) append_scaling(" window_rope_scaling=", s.window_rope.scaling, out);
  }
  if (!s.unrotated_layer.empty()) append_layers(" unrotated_layers=", s.unrotated_layer, out);
  if (!s.without_mlp.empty()) append_layers(" without_mlp=", s.without_mlp, out);
  const auto number = [&](const char* name, double value, double usual) {
    if (value != usual) out << " " << name << "=" << value;
  };
  number("attention_scale", s.attention.scale, 0);
  number("attention_cap", s.attention.soft_cap, 0);
  number("rotary", static_cast<double>(s.attention.rotary), 0);
  number("query_growth", s.attention.query_growth, 0);
  number("growth_length", static_cast<double>(s.attention.growth_length), 0);
  number("interleaved", s.attention.interleaved, 0);
  number("wide_norm", s.attention.wide_norm, 0);
  number("norm", static_cast<int>(s.norm), 0);
  number("norm_place", static_cast<int>(s.norm_place), 0);
  number("activation", static_cast<int>(s.activation.kind), 0);
  number("gated", s.activation.gated, 1);
  number("activation_limit", s.activation.limit, 0);
  number("sinks", s.attention.sinks, 0);
  number("least_step", s.delta_rule.least_step, 0);
  number("gate_latent", static_cast<double>(s.delta_rule.gate_latent), 0);
  number("expert_bias", s.expert_bias, 0);
  number("embedding_scale", s.scales.embedding, 1);
  number("residual_scale", s.scales.residual, 1);
  number("logits_scale", s.scales.logits, 1);
  number("logit_cap", s.scales.logit_cap, 0);
  number("router_sigmoid", s.router.sigmoid, 0);
  number("router_groups", static_cast<double>(s.router.groups), 1);
  number("router_top_groups", static_cast<double>(s.router.top_groups), 1);
  number("router_scaling", s.router.scaling, 1);
  number("shared_inner", static_cast<double>(s.shared_expert.inner), 0);
  const LatentShape& latent = s.latent;
  for (const auto& [value, name] : {std::pair{latent.query, "query_latent"},
                                    {latent.key_value, "key_value_latent"},
                                    {latent.plain, "plain_channels"},
                                    {latent.rotary, "rotary_channels"},
                                    {latent.value, "value_channels"}})
    number(name, static_cast<double>(value), 0);
  number("shared_gate", s.shared_expert.gate, 0);
}

}  // namespace

std::string fingerprint_of(const ModelShape& shape) {
  std::ostringstream out;
  out.precision(17);
  out << shape.architecture << " layers=" << shape.layers << " hidden=" << shape.hidden << " inner=" << shape.inner
      << " heads=" << shape.heads << " kv_heads=" << shape.kv_heads << " head_dim=" << shape.head_dim
      << " vocabulary=" << shape.vocabulary << " eps=" << shape.rms_norm_eps << " rope_theta=" << shape.rope_theta;
  if (shape.has_rope_scaling) append_scaling(" rope_scaling=", shape.rope_scaling, out);
  for (const auto& [flag, name] : {std::pair{shape.tied_head, "tied_head"},
                                   {shape.value_head, "value_head"},
                                   {shape.qkv_bias, "qkv_bias"},
                                   {shape.output_bias, "output_bias"},
                                   {shape.mlp_bias, "mlp_bias"},
                                   {shape.qk_norm, "qk_norm"}})
    if (flag) out << " " << name;
  if (shape.experts > 0) {
    out << " experts=" << shape.experts << " per_token=" << shape.experts_per_token
        << " expert_inner=" << shape.expert_inner << " norm_topk=" << shape.norm_topk_prob << " expert_layers=";
    for (const std::uint8_t layer : shape.expert_layer) out << (layer != 0 ? '1' : '0');
  }
  if (shape.window > 0) {
    out << " window=" << shape.window << " window_layers=";
    for (const std::uint8_t layer : shape.window_layer) out << (layer != 0 ? '1' : '0');
  }
  append_further(shape, out);
  if (shape.trained.nf4_parameters) out << " weights=nf4";
  if (!shape.trained.all()) out << kTrain << shape.trained.words;  // the last
  return std::move(out).str();
}

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
