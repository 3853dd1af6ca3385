#include "espalier/options/peft_names.h"

#include <algorithm>
#include <string_view>

namespace espalier {
namespace {

// Without the brackets, quotes and spaces of a list in Python or Hydra.
std::string plain_list(const std::string& value) {
  if (!value.starts_with('[') || !value.ends_with(']')) return value;
  std::string out = value.substr(1, value.size() - 2);
  std::erase_if(out, [](char c) { return std::string_view(" '\"").find(c) != std::string_view::npos; });
  return out;
}

bool is_none(const std::string& value) { return value == "none" || value == "None" || value == "null"; }

}  // namespace

const std::map<std::string, std::string>& peft_names() {
  static const std::map<std::string, std::string> names = {
      {"lora_r", "lora-rank"},          {"target_modules", "lora-target"}, {"lora_target_modules", "lora-target"},
      {"lora_adapter_path", "adapter"}, {"modules_to_save", "train"},      {"lora_modules_to_save", "train"}};
  return names;
}

std::vector<OptionSetting> translate_peft_names(const std::vector<OptionSetting>& settings,
                                                std::vector<std::string>& notes) {
  std::vector<OptionSetting> out;
  for (const OptionSetting& setting : settings) {
    std::string name = setting.name;
    std::ranges::replace(name, '-', '_');
    const auto found = peft_names().find(name);
    if (found == peft_names().end()) continue;
    const std::string& option = found->second;
    if ((option == "adapter" || option == "train") && (is_none(setting.value) || setting.value.empty())) continue;
    const std::string value = option == "adapter" ? setting.value : plain_list(setting.value);
    out.push_back({option, value, setting.where});
    notes.push_back(setting.where + name + " " + setting.value + " read as --" + option + " " + value);
  }
  return out;
}

}  // namespace espalier
