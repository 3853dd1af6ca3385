// Writing adapters in the two files that peft reads.
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <map>
#include <utility>

#include "espalier/base/atomic_file.h"
#include "espalier/base/error.h"
#include "espalier/checkpoint/adapter.h"
#include "espalier/checkpoint/file_tensors.h"
#include "espalier/checkpoint/json_file.h"
#include "espalier/checkpoint/tensor_names.h"
#include "espalier/shape/additions.h"

namespace espalier {
namespace fs = std::filesystem;
namespace {

// The last part of a module's name.
std::string last_part(const std::string& module) { return module.substr(module.rfind('.') + 1); }

// Its name without the layer: "mlp.experts.down_proj".
std::string without_layer(const std::string& module) {
  const std::string layers = "model.layers.";
  return module.starts_with(layers) ? module.substr(module.find('.', layers.size()) + 1) : module;
}

// Names of modules as peft matches them by their ends: short, where every module of the model with this end is chosen.
template <class Short>
std::vector<std::string> short_names(const std::vector<std::string>& all, const std::set<std::string>& chosen,
                                     Short short_of) {
  std::map<std::string, bool> whole;
  for (const std::string& module : all) {
    const auto [found, added] = whole.emplace(short_of(module), true);
    found->second = found->second && chosen.contains(module);
  }
  std::set<std::string> names;
  for (const std::string& module : chosen) names.insert(whole.at(short_of(module)) ? short_of(module) : module);
  return {names.begin(), names.end()};
}

// True if peft adapts the module by its parameter, as target_parameters: experts and routers always, which are no
// linear layers in transformers; in families with experts also others with these names, because peft reads them in
// target_modules as names of experts.
bool is_parameter(const ModelShape& shape, const std::string& module) {
  static const std::set<std::string> names = {"gate", "gate_proj", "up_proj", "down_proj"};
  const bool experts = shape.experts > 0,
             router = experts && module_name(module).ends_with(module_name(shape.names.router));
  if (module.find(".experts.") != module.npos || router) return true;
  return (experts || shape.names.beside_experts) && names.contains(last_part(module));
}

void write_targets(Json& config, const ModelShape& shape, const std::set<std::string>& adapted) {
  std::vector<std::string> modules, parameters;
  for (const std::string& module : adaptable_modules(shape))
    (is_parameter(shape, module) ? parameters : modules).push_back(module);
  std::set<std::string> of_modules, of_parameters;
  for (const std::string& module : adapted) (is_parameter(shape, module) ? of_parameters : of_modules).insert(module);
  std::vector<std::string> names = short_names(parameters, of_parameters, without_layer);
  for (std::string& name : names)
    if (name.find("experts.") == name.npos || name.find("shared_experts.") != name.npos) name += ".weight";
  if (!names.empty()) config["target_parameters"] = names;
  config["target_modules"] = short_names(modules, of_modules, last_part);
}

}  // namespace

std::string peft_name(const std::string& parameter) { return kAdapterPrefix + parameter; }

std::string prefix_of_files(const ModelShape& shape) { return shape.trained.added.exist() ? kAdapterPrefix : ""; }

std::string note_on_files(const ModelShape& shape) {
  if (!adapts_experts(shape)) return "";
  return "the adapter of experts is written in peft's form (target_parameters); for vLLM, convert it: "
         "python -m espalier.vllm_adapter ADAPTER OUT";
}

void write_added_values(const fs::path& target, const ModelShape& shape, const std::string& base,
                        const ParameterTable& table, DType from, const ParameterValues& values, DType to) {
  if (::mkdir(target.c_str(), 0777) != 0 && errno != EEXIST) throw_output_error(target, "create this directory", errno);
  std::set<std::string> adapted, whole;
  for (const AddedPair& pair : added_pairs(shape)) adapted.insert(pair.module);
  for (const Parameter& p : table.parameters())
    if (!p.added) whole.insert(saved_module(p.file_tensor()));
  const Additions& added = shape.trained.added;
  Json config;
  config["peft_type"] = "LORA";
  config["task_type"] = scores_sequences(shape) ? "SEQ_CLS" : shape.value_head ? "TOKEN_CLS" : "CAUSAL_LM";
  config["base_model_name_or_path"] = base;
  config["inference_mode"] = true;
  config["r"] = added.rank;
  if (added.alpha == std::floor(added.alpha) && added.alpha < 1e15)
    config["lora_alpha"] = static_cast<std::int64_t>(added.alpha);
  else
    config["lora_alpha"] = added.alpha;
  config["use_rslora"] = added.root_of_rank;
  config["lora_dropout"] = 0.0;
  config["bias"] = "none";
  config["fan_in_fan_out"] = false;
  config["init_lora_weights"] = true;
  write_targets(config, shape, adapted);
  config["modules_to_save"] = whole.empty() ? Json() : Json(std::vector<std::string>(whole.begin(), whole.end()));
  // peft takes the saved embedding for the head, too, only where both stand in the file.
  const bool with_head = shape.tied_head && !shape.value_head && table.contains(kEmbeddingName);
  if (with_head) config["ensure_weight_tying"] = true;
  write_json_file(target / "adapter_config.json", config);

  std::vector<FileTensor> tensors = file_tensors(table);
  const auto embedding = std::ranges::find(tensors, kEmbeddingName, &FileTensor::name);
  if (with_head) {
    FileTensor head = *embedding;
    head.name = kHeadName;
    tensors.insert(embedding + 1, std::move(head));
  }
  OutputFile output(target / "adapter_model.safetensors");
  SafetensorsWriter writer(output, specs_of(tensors, to, kAdapterPrefix));
  const Parameter* last = nullptr;  // its values are asked for once, also where two tensors hold them
  const void* own = nullptr;
  const auto give = [&](const Parameter& parameter, const ValueSink& sink) {
    if (&parameter != last) own = values(parameter), last = &parameter;
    give_converted(sink, tensor_type_of(from), own, to, parameter.count);
  };
  for (const FileTensor& tensor : tensors) append_tensor(writer, tensor, to, give);
  writer.finish();
  output.close_synced();
}

}  // namespace espalier
