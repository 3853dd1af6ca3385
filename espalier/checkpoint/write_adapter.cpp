// Writing adapters in the two files that peft reads.
#include <sys/stat.h>

#include <cerrno>
#include <cmath>
#include <map>

#include "espalier/base/atomic_file.h"
#include "espalier/base/error.h"
#include "espalier/checkpoint/adapter.h"
#include "espalier/checkpoint/convert.h"
#include "espalier/checkpoint/json_file.h"
#include "espalier/shape/trained_parameters.h"

namespace espalier {
namespace fs = std::filesystem;
namespace {

constexpr const char* kPrefix = "base_model.model.";

std::string without(const std::string& name, std::string_view ending) {
  return name.ends_with(ending) ? name.substr(0, name.size() - ending.size()) : name;
}

// The last part of a module's name.
std::string last_part(const std::string& module) { return module.substr(module.rfind('.') + 1); }

// Names of modules as peft matches them by their ends: short, where every module of the model with this end is chosen.
std::vector<std::string> short_names(const std::vector<std::string>& all, const std::set<std::string>& chosen) {
  std::map<std::string, bool> whole;
  for (const std::string& module : all) {
    const auto [found, added] = whole.emplace(last_part(module), true);
    found->second = found->second && chosen.contains(module);
  }
  std::set<std::string> names;
  for (const std::string& module : chosen) names.insert(whole.at(last_part(module)) ? last_part(module) : module);
  return {names.begin(), names.end()};
}

}  // namespace

std::string peft_name(const std::string& parameter) { return kPrefix + parameter; }

void write_adapter_directory(const fs::path& target, const ModelShape& shape, const std::string& base,
                             const ParameterTable& table, DType from, const ParameterValues& values, DType to) {
  if (::mkdir(target.c_str(), 0777) != 0 && errno != EEXIST) throw_output_error(target, "create this directory", errno);
  std::set<std::string> adapted, whole;
  std::vector<TensorSpec> specs;
  for (const Parameter& p : table.parameters()) {
    specs.push_back({peft_name(p.name), tensor_type_of(to), p.shape});
    if (p.low_rank)
      adapted.insert(without(without(p.name, ".lora_A.weight"), ".lora_B.weight"));
    else
      whole.insert(without(without(p.name, ".weight"), ".bias"));
  }
  const AdapterShape& adapter = shape.trained.adapter;
  Json config;
  config["peft_type"] = "LORA";
  config["task_type"] = scores_sequences(shape) ? "SEQ_CLS" : shape.value_head ? "TOKEN_CLS" : "CAUSAL_LM";
  config["base_model_name_or_path"] = base;
  config["inference_mode"] = true;
  config["r"] = adapter.rank;
  if (adapter.alpha == std::floor(adapter.alpha) && adapter.alpha < 1e15)
    config["lora_alpha"] = static_cast<std::int64_t>(adapter.alpha);
  else
    config["lora_alpha"] = adapter.alpha;
  config["use_rslora"] = adapter.root_of_rank;
  config["lora_dropout"] = 0.0;
  config["bias"] = "none";
  config["fan_in_fan_out"] = false;
  config["init_lora_weights"] = true;
  config["target_modules"] = short_names(adaptable_modules(shape), adapted);
  config["modules_to_save"] = whole.empty() ? Json() : Json(std::vector<std::string>(whole.begin(), whole.end()));
  write_json_file(target / "adapter_config.json", config);

  OutputFile output(target / "adapter_model.safetensors");
  SafetensorsWriter writer(output, specs, {{"format", "pt"}});
  std::vector<std::byte> converted;
  for (const Parameter& p : table.parameters()) {
    const auto* const own = static_cast<const std::byte*>(values(p));
    converted.resize(static_cast<std::size_t>(p.count * bytes_of(to)));
    convert_values(tensor_type_of(from), own, to, converted.data(), p.count);
    writer.append(converted.data(), p.count * bytes_of(to));
  }
  writer.finish();
  output.close_synced();
}

}  // namespace espalier
