// A LoRA adapter as peft stores it: adapter_config.json and adapter_model.safetensors.
//
//   W' = W + s B A,  s = alpha / r, or alpha / sqrt(r) with use_rslora
//
// Modules whose names match an expression may have another r or alpha (rank_pattern, alpha_pattern; the first match
// counts). A [r, in] is base_model.model.<module>.lora_A.weight, B [out, r] base_model.model.<module>.lora_B.weight. A
// module of modules_to_save is stored whole, base_model.model.<module>.weight (and .bias). Beside an adapter of the
// head peft stores W, base_model.model.lm_head.base_layer.weight. Modules that are several projections here, and
// experts: checkpoint/adapter_places.h.
// Source: peft 0.21, LoraConfig and get_peft_model_state_dict.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "espalier/base/expression.h"
#include "espalier/base/json.h"
#include "espalier/checkpoint/adapter_places.h"
#include "espalier/checkpoint/added_values.h"
#include "espalier/checkpoint/safetensors.h"
#include "espalier/model/parameters.h"

namespace espalier {

class Adapter final : public AddedValues {
 public:
  // `base`: the shape of the base model. Errors: InputError for a directory without the two files, for damaged files,
  // for a tensor that no parameter of the model belongs to, for shapes that do not fit, for half of a pair and for a
  // listed target without its pair; UnsupportedError, with the member's or tensor's name, for adapters that compute
  // another formula (DoRA, biases, other methods) or give a tied head and its embedding different values.
  Adapter(const std::filesystem::path& directory, const ModelShape& base);

  bool changes(const std::string& parameter) const { return changes_.contains(parameter); }
  std::int64_t changed() const { return static_cast<std::int64_t>(changes_.size()); }  // parameters
  // The values for modules that no pattern names.
  std::int64_t rank() const { return common_.rank; }
  bool root_of_rank() const { return root_of_rank_; }
  double dropout() const { return dropout_; }
  double scale() const { return scale_of(common_); }  // s, of the same

  // r and alpha of a module.
  struct Size {
    std::int64_t rank = 0;
    double alpha = 0;
  };
  // One r and alpha for all modules: the largest r. `values` fills smaller A and B with zeros, which add nothing to the
  // product and whose gradients are 0. Errors: UnsupportedError if modules have different factors s.
  Size common_size() const;
  // Modules with lora_A and lora_B, and parameters of modules_to_save.
  std::set<std::string> modules() const;
  std::vector<std::string> whole() const;
  // A and B have the shapes that an adapter of common_size() has.
  bool has(const std::string& parameter) const override;
  std::vector<std::byte> values(const std::string& parameter, DType dtype) const override;
  // True if it stands beside a tied head. It then changes the logits but not the embedding, so no merged matrix exists.
  bool changes_tied_head() const;

  // Turns the base model's values of a parameter that the adapter changes into those with the adapter. Errors:
  // InputError for values of the adapter that are not finite.
  void apply(const std::string& parameter, std::vector<double>& values) const;

 private:
  // A parameter in a tensor of the file.
  struct Piece {
    const SafetensorsEntry* entry = nullptr;
    FilePlace place;

    std::vector<std::byte> values(DType dtype) const;
  };
  struct Change {
    Piece a, b;            // W + s B A
    Piece whole;           // in place of W; beside a and b: W itself
    bool is_base = false;  // `whole` is W, which peft saves beside an adapter of the head
    double scale = 0;      // s
  };
  // A value for modules whose whole name the expression matches.
  struct Pattern {
    Expression expression;
    double value = 0;
  };
  void read_config(const Json& config, const std::string& where);
  static std::vector<Pattern> patterns(const Json& config, const char* member, const std::string& where);
  Size size_of(const std::string& module) const;
  double scale_of(const Size& size) const;
  static std::pair<std::int64_t, std::int64_t> sides_of(const Piece& piece);
  // True if the config's target_parameters name it.
  bool is_targeted(const std::string& parameter) const;
  void place(const SafetensorsEntry& entry, const ParameterTable& base);
  void place_whole(const SafetensorsEntry& entry, const std::string& tensor, const ParameterTable& base);
  // Tensors that hold several parameters, or one of another name.
  struct Joint {
    std::vector<AddedPair> parts;
    std::map<std::string, FilePlace> places;
    std::map<std::string, const SafetensorsEntry*> tensors;  // null: not in the file
    std::set<std::string> needed;                            // of the config's target_parameters
    bool tied_head = false;
  };
  Joint joint_of(const ModelShape& base, const ParameterTable& table) const;
  ModelShape joint_shape(const ModelShape& base, std::int64_t rank) const;
  void place_joint(const ParameterTable& table);
  Piece piece_of(const std::string& parameter) const;
  void expect_finite(const Piece& piece) const;
  std::vector<double> doubles_of(const Piece& piece) const;
  void check_tied_head() const;
  void check(const std::string& parameter, Change& change, const ParameterTable& base) const;
  void check_targets(const Json& config, const std::string& where, const ParameterTable& base) const;

  SafetensorsFile file_;
  Size common_, largest_;
  std::vector<Pattern> ranks_, alphas_;
  std::vector<std::string> target_parameters_;
  double dropout_ = 0;
  bool root_of_rank_ = false;
  std::map<std::string, Change> changes_;  // by the base model's parameter
  std::map<std::string, Piece> pieces_;    // of joint tensors, by the adapters' parameters
  std::set<std::string> modules_;          // with joint tensors
  std::vector<std::string> to_save_;       // modules_to_save
  Joint joint_;
};

// True if the directory holds an adapter; the model that its config names, empty where it names none.
bool is_adapter(const std::filesystem::path& directory);
std::string base_named_in(const std::filesystem::path& directory);
// True if it is one of a ...ForSequenceClassification, a reward model; of a ...ForTokenClassification, a critic.
bool is_reward_adapter(const std::filesystem::path& directory);
bool is_critic_adapter(const std::filesystem::path& directory);

// "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight".
std::string peft_name(const std::string& parameter);

}  // namespace espalier
