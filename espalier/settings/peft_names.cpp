#include "espalier/settings/peft_names.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "espalier/base/error.h"
#include "espalier/options/option_value.h"

namespace espalier {
namespace {

std::string underscored(std::string name) {
  std::ranges::replace(name, '-', '_');
  return name;
}

// Without the brackets, quotes and spaces of a list in Python or Hydra.
std::string plain_list(const std::string& value) {
  if (!value.starts_with('[') || !value.ends_with(']')) return value;
  std::string out = value.substr(1, value.size() - 2);
  std::erase_if(out, [](char c) { return std::string_view(" '\"").find(c) != std::string_view::npos; });
  return out;
}

// No module, or none besides: what the option does without the name.
bool is_off(const std::string& value) {
  return is_none(value) || value.empty() || value == "[]" || value == "{}" || value == "false" || value == "False";
}

bool is_parameters(const std::string& name) { return name.ends_with("target_parameters"); }

// "gate.weight,experts.down_proj" -> "gate,experts.down_proj": a matrix under the name of its module.
std::string as_modules(const std::string& parameters) {
  std::string out = parameters + ',';
  for (std::size_t at = 0; (at = out.find(".weight,", at)) != std::string::npos;) out.erase(at, 7);
  out.pop_back();
  return out;
}

constexpr const char* kExpressions =
    "name the modules with --lora-target, which takes regular expressions over whole names: "
    "model[.]layers[.](?!0[.]).*[.]q_proj";
constexpr const char* kWithPeft =
    "make the adapter with peft (get_peft_model, save_pretrained) and give its directory with --adapter";
constexpr const char* kMerge = "leave it out, or train the adapter with peft and merge it with peft";

constexpr std::array kRefused = {
    RefusedPeftName{"exclude_modules", "lora-target", "no exceptions from the targets", kExpressions},
    RefusedPeftName{"layers_to_transform", "lora-target", "targets in all layers", kExpressions},
    RefusedPeftName{"layers_pattern", "lora-target", "targets in all layers", kExpressions},
    RefusedPeftName{"rank_pattern", "lora-rank", "one rank", kWithPeft},
    RefusedPeftName{"alpha_pattern", "lora-alpha", "one alpha", kWithPeft},
    RefusedPeftName{"use_dora", "lora-rank", "adapters of low rank alone", kMerge},
    RefusedPeftName{"lora_bias", "lora-rank", "adapters without biases", kMerge}};

}  // namespace

const std::map<std::string, std::string>& peft_names() {
  static const std::map<std::string, std::string> names = {{"lora_r", "lora-rank"},
                                                           {"target_modules", "lora-target"},
                                                           {"lora_target_modules", "lora-target"},
                                                           {"target_parameters", "lora-target"},
                                                           {"lora_target_parameters", "lora-target"},
                                                           {"lora_adapter_path", "adapter"},
                                                           {"modules_to_save", "train"},
                                                           {"lora_modules_to_save", "train"}};
  return names;
}

std::span<const RefusedPeftName> refused_peft_names() { return kRefused; }

const RefusedPeftName* refused_peft_name(std::string_view name) {
  const auto found = std::ranges::find(kRefused, underscored(std::string(name)), &RefusedPeftName::name);
  return found == kRefused.end() ? nullptr : &*found;
}

std::vector<OptionSetting> translate_peft_names(const std::vector<OptionSetting>& settings,
                                                std::vector<std::string>& notes) {
  std::vector<OptionSetting> out;
  const OptionSetting* targets = nullptr;
  for (const OptionSetting& setting : settings) {
    const std::string name = underscored(setting.name);
    if (const RefusedPeftName* const refused = refused_peft_name(name); refused != nullptr && !is_off(setting.value))
      throw UnsupportedError({setting.where + name, refused->expected, setting.value, refused->remedy});
    const auto found = peft_names().find(name);
    if (found == peft_names().end()) continue;
    const std::string& option = found->second;
    if (option != "lora-rank" && is_off(setting.value)) continue;
    std::string value = option == "adapter" ? setting.value : plain_list(setting.value);
    if (is_parameters(name)) value = as_modules(value);
    notes.push_back(setting.where + name + " " + setting.value + " read as --" + option + " " + value);
    // Modules and parameters are targets both.
    if (option == "lora-target" && targets != nullptr &&
        is_parameters(name) != is_parameters(underscored(targets->name)))
      std::ranges::find(out, option, &OptionSetting::name)->value += "," + value;
    else
      out.push_back({option, value, setting.where});
    if (option == "lora-target") targets = &setting;
  }
  return out;
}

}  // namespace espalier
