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
#include "espalier/checkpoint/convert.h"
#include "espalier/checkpoint/json_file.h"
#include "espalier/shape/trained_parameters.h"

namespace espalier {
namespace fs = std::filesystem;
namespace {

constexpr const char* kPrefix = "base_model.model.";
constexpr const char *kHead = "lm_head.weight", *kEmbedding = "model.embed_tokens.weight";
constexpr std::int64_t kBlock = std::int64_t{1} << 18;  // numbers that are converted at once

std::string without(const std::string& name, std::string_view ending) {
  return name.ends_with(ending) ? name.substr(0, name.size() - ending.size()) : name;
}

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

std::string peft_name(const std::string& parameter) { return kPrefix + parameter; }

void write_adapter_directory(const fs::path& target, const ModelShape& shape, const std::string& base,
                             const ParameterTable& table, DType from, const ParameterValues& values, DType to) {
  if (::mkdir(target.c_str(), 0777) != 0 && errno != EEXIST) throw_output_error(target, "create this directory", errno);
  std::set<std::string> adapted, whole;
  for (const AdapterPart& part : adapter_parts(shape)) adapted.insert(part.module);
  for (const Parameter& p : table.parameters())
    if (!p.low_rank) whole.insert(without(without(p.name, ".weight"), ".bias"));
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
  write_targets(config, shape, adapted);
  config["modules_to_save"] = whole.empty() ? Json() : Json(std::vector<std::string>(whole.begin(), whole.end()));
  // peft takes the saved embedding for the head, too, only where both stand in the file.
  const bool with_head = shape.tied_head && !shape.value_head && table.contains(kEmbedding);
  if (with_head) config["ensure_weight_tying"] = true;
  write_json_file(target / "adapter_config.json", config);

  OutputFile output(target / "adapter_model.safetensors");
  const AdapterTensors tensors(&shape, table, kPrefix, with_head);
  SafetensorsWriter writer(output, tensors.specs(to), {{"format", "pt"}});
  tensors.append(writer, from, values, to);
  writer.finish();
  output.close_synced();
}

AdapterTensors::AdapterTensors(const ModelShape* shape, const ParameterTable& table, std::string prefix, bool with_head)
    : table_(table), prefix_(std::move(prefix)), with_head_(with_head) {
  if (shape != nullptr) places_ = adapter_places(*shape);
  for (const auto& [name, place] : places_) ++parts_[place.tensor];
}

template <class Visit>
void AdapterTensors::for_each(Visit visit) const {
  std::map<std::string, std::int64_t> done;
  for (const Parameter& p : table_.parameters()) {
    const auto found = places_.find(p.name);
    const AdapterPlace* const place = found == places_.end() ? nullptr : &found->second;
    visit(p, place, place == nullptr || ++done[place->tensor] == parts_.at(place->tensor));
  }
}

std::vector<TensorSpec> AdapterTensors::specs(DType dtype) const {
  std::vector<TensorSpec> out;
  for_each([&](const Parameter& p, const AdapterPlace* place, bool complete) {
    if (!complete) return;
    out.push_back({prefix_ + (place == nullptr ? p.name : place->tensor), tensor_type_of(dtype), p.shape});
    if (place != nullptr) out.back().shape = {place->tensor_rows, place->tensor_columns};
    if (with_head_ && p.name == kEmbedding) out.push_back({prefix_ + kHead, tensor_type_of(dtype), p.shape});
  });
  return out;
}

void AdapterTensors::append(SafetensorsWriter& writer, DType from, const ParameterValues& values, DType to) const {
  std::map<std::string, std::vector<std::byte>> joined;
  std::vector<std::byte> converted;
  const std::int64_t bytes = bytes_of(to);
  for_each([&](const Parameter& p, const AdapterPlace* place, bool complete) {
    const auto* const own = static_cast<const std::byte*>(values(p));
    const auto convert = [&](std::int64_t first, std::int64_t count) {
      converted.resize(static_cast<std::size_t>(count * bytes));
      convert_values(tensor_type_of(from), own + first * bytes_of(from), to, converted.data(), count);
      return converted.data();
    };
    if (place == nullptr || place->is_tensor()) {
      // In blocks: a copy of a large embedding would not be in the plan.
      for (int times = with_head_ && p.name == kEmbedding ? 2 : 1; times > 0; --times)
        for (std::int64_t first = 0; first < p.count; first += kBlock) {
          const std::int64_t count = std::min(kBlock, p.count - first);
          writer.append(convert(first, count), count * bytes);
        }
      return;
    }
    convert(0, p.count);
    std::vector<std::byte>& tensor = joined[place->tensor];
    tensor.resize(static_cast<std::size_t>(place->tensor_rows * place->tensor_columns * bytes));
    const std::int64_t run = place->column_step == 1 ? place->columns : 1;  // neighbours in both
    const std::byte* next = converted.data();
    for (std::int64_t i = 0; i < place->rows; ++i)
      for (std::int64_t j = 0; j < place->columns; j += run, next += run * bytes)
        std::copy(next, next + run * bytes, tensor.begin() + place->at(i, j) * bytes);
    if (!complete) return;
    writer.append(tensor.data(), static_cast<std::int64_t>(tensor.size()));
    joined.erase(place->tensor);
  });
}

}  // namespace espalier
