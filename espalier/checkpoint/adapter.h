// A LoRA adapter as peft stores it: adapter_config.json and adapter_model.safetensors.
//
//   W' = W + s B A,  s = alpha / r, or alpha / sqrt(r) with use_rslora
//
// A [r, in] is base_model.model.<module>.lora_A.weight, B [out, r] base_model.model.<module>.lora_B.weight. A module of
// modules_to_save is stored whole, base_model.model.<module>.weight (and .bias). Beside an adapter of the head peft
// stores W, base_model.model.lm_head.base_layer.weight.
// Source: peft 0.21, LoraConfig and get_peft_model_state_dict.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "espalier/base/json.h"
#include "espalier/checkpoint/safetensors.h"
#include "espalier/model/parameters.h"

namespace espalier {

class Adapter {
 public:
  // `base`: all parameters of the base model, undivided. Errors: InputError for a directory without the two files, for
  // damaged files, for a tensor that no parameter of the model belongs to, for shapes that do not fit, for half of a
  // pair and for a listed target without its pair; UnsupportedError, with the member's or tensor's name, for adapters
  // that compute another formula (DoRA, biases, ranks by pattern, other methods).
  Adapter(const std::filesystem::path& directory, const ParameterTable& base);

  bool changes(const std::string& parameter) const { return changes_.contains(parameter); }
  std::int64_t changed() const { return static_cast<std::int64_t>(changes_.size()); }  // parameters
  std::int64_t rank() const { return rank_; }
  double alpha() const { return alpha_; }
  bool root_of_rank() const { return root_of_rank_; }
  double dropout() const { return dropout_; }
  double scale() const { return scale_; }
  // Modules with lora_A and lora_B, and parameters that are stored whole.
  std::set<std::string> modules() const;
  std::vector<std::string> whole() const;
  // The tensor of <module>.lora_A.weight, <module>.lora_B.weight, or of a parameter that is stored whole; null: none.
  const SafetensorsEntry* find(const std::string& parameter) const;

  // Turns the base model's values of a parameter that the adapter changes into those with the adapter.
  void apply(const std::string& parameter, std::vector<double>& values) const;

 private:
  struct Change {
    const SafetensorsEntry* a = nullptr;  // with b: W + s B A
    const SafetensorsEntry* b = nullptr;
    const SafetensorsEntry* whole = nullptr;  // in place of W; beside a and b: W itself
    bool is_base = false;                     // `whole` is W, which peft saves beside an adapter of the head
  };
  void read_config(const Json& config, const std::string& where);
  void place(const SafetensorsEntry& entry, const ParameterTable& base);
  void check(const std::string& parameter, const Change& change, const ParameterTable& base) const;
  void check_targets(const Json& config, const std::string& where, const ParameterTable& base) const;

  SafetensorsFile file_;
  std::int64_t rank_ = 0;
  double alpha_ = 0, scale_ = 0, dropout_ = 0;
  bool root_of_rank_ = false;
  std::map<std::string, Change> changes_;  // by the base model's parameter
};

// Whether the directory holds an adapter; the model that its config names, empty where it names none.
bool is_adapter(const std::filesystem::path& directory);
std::string base_named_in(const std::filesystem::path& directory);
// Whether it is one of a ...ForSequenceClassification, a reward model; of a ...ForTokenClassification, a critic.
bool is_reward_adapter(const std::filesystem::path& directory);
bool is_critic_adapter(const std::filesystem::path& directory);

// "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight".
std::string peft_name(const std::string& parameter);

// Fills the directory `target`, created when absent, with the two files of an adapter: the table's parameters, those
// that are no part of an adapter as modules_to_save. `base`: the model's directory, which the config names. Errors:
// OptionError for a failing output.
void write_adapter_directory(const std::filesystem::path& target, const ModelShape& shape, const std::string& base,
                             const ParameterTable& table, DType from, const ParameterValues& values, DType to);

}  // namespace espalier
