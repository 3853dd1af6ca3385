#include "espalier/options/settings.h"

#include <algorithm>
#include <map>

#include "espalier/base/error.h"
#include "espalier/options/option_value.h"

namespace espalier {
namespace {

const std::map<std::string, std::vector<std::string>>& alias_table() {
  static const std::map<std::string, std::vector<std::string>> table = {
      {"epsilon", {"clip-ratio-low", "clip-ratio-high"}},
      {"epsilon_high", {"clip-ratio-high"}},
      {"beta", {"kl-loss-coef"}},
      {"delta", {"clip-ratio-c"}},
      {"scale_rewards", {"adv-estimator"}},
      {"loss_type", {"loss-agg-mode", "policy-loss"}}};
  return table;
}

std::string underscored(std::string_view name) {
  std::string out(name);
  std::replace(out.begin(), out.end(), '-', '_');
  return out;
}

// One source's aliases, turned into settings under Espalier's names.
class Translation {
 public:
  Translation(const std::vector<OptionSetting>& settings, std::vector<std::string>& notes) : notes_(notes) {
    for (const OptionSetting& setting : settings)
      if (is_alias(setting.name)) given_[underscored(setting.name)] = &setting;  // the last one counts
    loss_type();
    clipping();
    if (const OptionSetting* beta = take("beta")) replace(*beta, "kl-loss-coef", beta->value);
    if (const OptionSetting* delta = take("delta"))
      replace(
          *delta, "clip-ratio-c", delta->value,
          "TRL caps the ratio of the unclipped branch; the loss is the same where delta exceeds 1 + clip-ratio-high");
    scale_rewards();
  }
  const std::vector<OptionSetting>& settings() const { return out_; }

 private:
  const OptionSetting* take(const std::string& alias) const {
    const auto found = given_.find(alias);
    return found == given_.end() ? nullptr : found->second;
  }
  void replace(const OptionSetting& from, const std::string& name, const std::string& value,
               const std::string& why = "") {
    out_.push_back({name, value, from.where});
    notes_.push_back(from.where + "TRL's " + underscored(from.name) + " " + from.value + " read as --" + name + " " +
                     value + (why.empty() ? "" : "; " + why));
  }

  void loss_type() {
    const OptionSetting* given = take("loss_type");
    if (!given) return;
    const std::string& type = given->value;
    if (type == "grpo")
      replace(*given, "loss-agg-mode", "seq-mean-token-mean");
    else if (type == "dapo")
      replace(*given, "loss-agg-mode", "token-mean");
    else if (type == "bnpo")
      replace(*given, "loss-agg-mode", "token-mean", "over the mini-batch, whatever the waves");
    else if (type == "dr_grpo")
      replace(*given, "loss-agg-mode", "seq-mean-token-sum-norm", "TRL's max_completion_length is --loss-scale-factor");
    else if (type == "cispo") {
      replace(*given, "policy-loss", "cispo");
      replace(*given, "loss-agg-mode", "token-mean");
    } else if (type == "sapo") {
      replace(*given, "policy-loss", "sapo");
    } else if (type == "luspo" || type == "vespo") {
      throw UnsupportedError({given->where + "--loss-type", "", type + " has no counterpart here",
                              "supported: grpo, dapo, bnpo, dr_grpo, cispo, sapo"});
    } else {
      throw OptionError(
          {given->where + "--loss-type", "one of grpo, dapo, bnpo, dr_grpo, cispo, sapo", '"' + type + '"', ""});
    }
  }

  void clipping() {
    const OptionSetting* epsilon = take("epsilon");
    const OptionSetting* high = take("epsilon_high");
    const OptionSetting* type = take("loss_type");
    if (type && type->value == "cispo") {
      // TRL's CISPO has no lower clip and takes epsilon_high as the cap itself, not as a distance from 1.
      replace(*type, "clip-ratio-low", "1", "TRL's cispo does not clip from below");
      if (!high) return;
      const double cap = parse_number(high->value, high->where + "--epsilon-high", "a number");
      if (cap < 1)
        throw OptionError({high->where + "--epsilon-high", "at least 1: for cispo it is the cap of the ratio itself",
                           '"' + high->value + '"', ""});
      replace(*high, "clip-ratio-high", number_text(cap - 1), "for cispo TRL's value is the cap itself");
      return;
    }
    if (epsilon) {
      replace(*epsilon, "clip-ratio-low", epsilon->value);
      if (!high) replace(*epsilon, "clip-ratio-high", epsilon->value);
    }
    if (high) replace(*high, "clip-ratio-high", high->value);
  }

  void scale_rewards() {
    const OptionSetting* given = take("scale_rewards");
    if (!given) return;
    const std::string& value = given->value;
    if (value == "group" || value == "true" || value == "True")
      replace(*given, "adv-estimator", "grpo", "1e-6 is added to the deviation, 1e-4 in TRL");
    else if (value == "none" || value == "false" || value == "False")
      replace(*given, "adv-estimator", "dr_grpo");
    else if (value == "batch")
      throw UnsupportedError(
          {given->where + "--scale-rewards", "", "batch has no counterpart here", "supported: group, none"});
    else
      throw OptionError({given->where + "--scale-rewards", "one of group, none", '"' + value + '"', ""});
  }

  std::map<std::string, const OptionSetting*> given_;
  std::vector<OptionSetting> out_;
  std::vector<std::string>& notes_;
};

}  // namespace

bool is_alias(std::string_view name) { return alias_table().contains(underscored(name)); }

std::vector<std::string> alias_names() {
  std::vector<std::string> names;
  for (const auto& [name, targets] : alias_table()) names.push_back(name);
  return names;
}

std::vector<std::string> alias_targets(std::string_view name) {
  const auto found = alias_table().find(underscored(name));
  return found == alias_table().end() ? std::vector<std::string>{} : found->second;
}

void apply_settings(Options& options, const std::vector<OptionSetting>& settings, std::vector<std::string>& notes) {
  const Translation translation(settings, notes);
  for (const OptionSetting& setting : translation.settings())
    set_option(options, setting.name, setting.value, setting.where);
  for (const OptionSetting& setting : settings)
    if (!is_alias(setting.name)) set_option(options, setting.name, setting.value, setting.where);
}

}  // namespace espalier
