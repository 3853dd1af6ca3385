#include "espalier/settings/trl_names.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <utility>

#include "espalier/base/error.h"
#include "espalier/options/option_value.h"
#include "espalier/settings/peft_names.h"

namespace espalier {
namespace {

const std::map<std::string, std::vector<std::string>>& name_table() {
  static const std::map<std::string, std::vector<std::string>> table = {
      {"epsilon", {"clip-ratio-low", "clip-ratio-high"}},
      {"epsilon_high", {"clip-ratio-high"}},
      {"delta", {"ratio-cap"}},
      {"beta", {"kl-loss-coef"}},
      {"use_bias_correction_kl", {"kl-loss-type"}},
      {"loss_type", {"loss-agg-mode", "policy-loss"}},
      {"importance_sampling_level", {"ratio-level"}},
      {"scale_rewards", {"adv-estimator"}},
      {"sapo_temperature_pos", {"tau-pos"}},
      {"sapo_temperature_neg", {"tau-neg"}},
      {"vespo_k_pos", {"vespo-weights"}},
      {"vespo_lambda_pos", {"vespo-weights"}},
      {"vespo_k_neg", {"vespo-weights"}},
      {"vespo_lambda_neg", {"vespo-weights"}},
      {"max_completion_length", {"loss-scale-factor", "max-response-length"}},
      {"num_items_in_batch", {"token-mean-divisor"}},
      {"gradient_accumulation_steps", {"token-divisor-scale"}},
      {"steps_per_generation", {"token-divisor-scale"}},
      {"entropy_coef", {"entropy-coeff"}},
      {"off_policy_mask_threshold", {"off-policy-threshold"}},
      {"vllm_importance_sampling_correction", {"rollout-is"}},
      {"vllm_importance_sampling_mode", {"rollout-is"}},
      {"vllm_importance_sampling_clip_max", {"rollout-is-threshold"}},
      {"vllm_importance_sampling_cap", {"rollout-is-threshold"}},
      {"vllm_importance_sampling_clip_min", {"rollout-is-floor"}},
      {"top_entropy_quantile", {"policy-loss"}},
      {"use_adaptive_entropy", {"entropy-coeff"}},
      {"multi_objective_aggregation", {"adv-estimator"}},
      {"mask_truncated_completions", {"policy-loss"}}};
  return table;
}

// TRL's losses: the policy loss (""; the default), the aggregation, whether sums are divided by num_items_in_batch,
// whether they are means over the tokens of each micro-batch, and whether `delta` caps the ratio.
struct TrlLoss {
  const char *type, *policy_loss, *aggregation;
  bool by_items, by_micro_batch, takes_delta;
};
constexpr TrlLoss kLosses[] = {{"grpo", "", "seq-mean-token-mean", false, false, true},
                               {"dapo", "", "token-mean", true, false, true},
                               {"bnpo", "", "token-mean", false, true, true},
                               {"dr_grpo", "", "seq-mean-token-sum-norm", false, false, true},
                               {"cispo", "cispo", "token-mean", true, false, false},
                               {"sapo", "sapo", "seq-mean-token-mean", false, false, false},
                               {"luspo", "", "seq-mean-token-sum", false, false, true},
                               {"vespo", "vespo", "token-mean", true, false, false}};

std::string underscored(std::string_view name) {
  std::string out(name);
  std::replace(out.begin(), out.end(), '-', '_');
  return out;
}

class Translation {
 public:
  Translation(const std::vector<OptionSetting>& settings, std::vector<std::string>& notes) : notes_(notes) {
    for (const OptionSetting& setting : settings)
      if (name_table().contains(underscored(setting.name))) given_[underscored(setting.name)] = &setting;
    if (given_.empty()) return;
    const bool pairs = std::ranges::any_of(settings, [](const OptionSetting& each) {
      return underscored(each.name) == "objective" && each.value == "dpo";
    });
    if (pairs) {
      of_pairs();
      return;
    }
    loss_ = given_loss();
    refuse();
    defaults();
    loss_type();
    clipping();
    kl();
    rewards();
    sampling_weights();
    pass("sapo_temperature_pos", "tau-pos");
    pass("sapo_temperature_neg", "tau-neg");
    divisor();
    pass("entropy_coef", "entropy-coeff");
    if (const OptionSetting* threshold = take("off_policy_mask_threshold"); threshold && !is_none(threshold->value))
      replace(*threshold, "off-policy-threshold", threshold->value);
    vespo();
  }
  std::vector<OptionSetting> settings() { return std::move(out_); }

 private:
  const OptionSetting* take(const std::string& name) const {
    const auto found = given_.find(name);
    return found == given_.end() ? nullptr : found->second;
  }
  std::string value_of(const std::string& name, const std::string& absent) const {
    const OptionSetting* given = take(name);
    return given ? given->value : absent;
  }
  bool flag(const std::string& name, bool absent) const {
    const OptionSetting* given = take(name);
    if (!given) return absent;
    std::string value = given->value;
    std::ranges::transform(value, value.begin(), [](unsigned char c) { return std::tolower(c); });
    return parse_flag(value, given->where + "--" + given->name);
  }

  double whole_number(const OptionSetting& given) const {
    const std::string where = given.where + "--" + given.name;
    const std::int64_t value = parse_integer(given.value, where, "a whole number");
    if (value < 1) throw OptionError({where, "at least 1", given.value, ""});
    return static_cast<double>(value);
  }

  void set(const std::string& name, const std::string& value) { out_.push_back({name, value, ""}); }
  void imply(const std::string& name, const std::string& value) { out_.push_back({name, value, "", true}); }
  void replace(const OptionSetting& from, const std::string& name, const std::string& value) {
    out_.push_back({name, value, from.where});
    notes_.push_back(from.where + "TRL's " + underscored(from.name) + " " + from.value + " read as --" + name + " " +
                     value);
  }
  // Names that DPOConfig shares with GRPOConfig.
  void of_pairs() {
    pass("beta", "dpo-beta");
    pass("loss_type", "dpo-loss");
    for (const auto& [name, setting] : given_)
      if (name != "beta" && name != "loss_type")
        throw OptionError({setting->where + "--" + setting->name, "no such option with --objective dpo", setting->value,
                           "leave it out"});
  }
  void pass(const std::string& trl, const std::string& own) {
    if (const OptionSetting* given = take(trl)) replace(*given, own, given->value);
  }
  [[noreturn]] void unsupported(const OptionSetting& given, const std::string& why, const std::string& remedy) const {
    throw UnsupportedError({given.where + "--" + given.name, "", why, remedy});
  }
  void expect_one_of(const OptionSetting& given, const std::vector<std::string>& known) const {
    if (std::ranges::find(known, given.value) != known.end()) return;
    std::string list;
    for (const std::string& each : known) list += (list.empty() ? "one of " : ", ") + each;
    throw OptionError({given.where + "--" + given.name, list, '"' + given.value + '"', ""});
  }

  // Values that change nothing are taken; others need what is known only when a whole micro-batch has run.
  void refuse() const {
    if (const OptionSetting* given = take("top_entropy_quantile");
        given && given->value != "1" && given->value != "1.0")
      unsupported(*given, "Espalier cannot select tokens by a quantile of their micro-batch's entropies",
                  "leave it out, or mask the tokens in loss_mask");
    if (const OptionSetting* given = take("use_adaptive_entropy"); given && flag("use_adaptive_entropy", false))
      unsupported(*given, "Espalier has no entropy coefficient that changes from step to step", "give entropy_coef");
    if (const OptionSetting* given = take("multi_objective_aggregation"); given && given->value != "sum_then_normalize")
      unsupported(*given, "records have one reward, the sum", "record the advantages and use --adv-estimator given");
    if (const OptionSetting* given = take("mask_truncated_completions");
        given && flag("mask_truncated_completions", false))
      unsupported(*given, "TRL also removes a truncated rollout's tokens from the context",
                  "set the rollout's loss_mask to 0");
  }

  void defaults() {
    imply("clip-ratio-c", "inf");
    imply("log-ratio-bound", "inf");
    imply("kl-loss-type", "k3_unbiased");
    imply("adv-epsilon", "0.0001");
    imply("group-of-one", "zero");
    imply("token-count-epsilon", "0");
    imply("loss-agg-mode", "token-mean");
    imply("entropy-agg-mode", "token-mean");
    imply("weight-decay", "0");
    imply("decay-matrices-only", "true");
    notes_.push_back(
        "TRL's names: TRL's formulas and defaults (no dual clip, log-ratios unbounded, k3 times the ratio, 1e-4 beside "
        "the deviation, advantage 0 in a group of one, loss_type dapo, weight decay 0); options given under our names "
        "win");
  }

  void loss_type() {
    const OptionSetting* given = take("loss_type");
    if (!given) return;
    if (*loss_.policy_loss) replace(*given, "policy-loss", loss_.policy_loss);
    replace(*given, "loss-agg-mode", loss_.aggregation);
  }
  // The row of loss_type, TRL's default without one.
  const TrlLoss& given_loss() const {
    const OptionSetting* given = take("loss_type");
    std::vector<std::string> types;
    for (const TrlLoss& loss : kLosses) types.emplace_back(loss.type);
    if (given) expect_one_of(*given, types);
    return *std::ranges::find(kLosses, value_of("loss_type", "dapo"),
                              [](const TrlLoss& l) { return std::string(l.type); });
  }

  // TRL divides dapo, cispo and vespo by num_items_in_batch, which counts a generation batch, times
  // gradient_accumulation_steps / steps_per_generation. Its other losses and its entropy bonus are means over
  // micro-batches of means over a micro-batch. For a mean over rollouts it is the mean over the mini-batch; for a mean
  // over tokens it is so where the mini-batch is one micro-batch.
  void divisor() {
    const OptionSetting *items = take("num_items_in_batch"), *parts = take("gradient_accumulation_steps"),
                        *steps = take("steps_per_generation");
    const double accumulated = parts ? whole_number(*parts) : 1;
    const double scale = accumulated / (steps && !is_none(steps->value) ? whole_number(*steps) : accumulated);
    const std::string type = loss_.type;
    const OptionSetting* entropy = take("entropy_coef");
    const bool bonus = entropy && parse_number(entropy->value, entropy->where + "--entropy-coef", "a number") != 0;
    if (accumulated != 1 && (loss_.by_micro_batch || bonus))
      unsupported(*parts,
                  (bonus ? std::string("the entropy bonus") : type) +
                      " takes a mean over the tokens of each micro-batch, and records do not tell micro-batches apart",
                  "give each micro-batch as a mini-batch with gradient_accumulation_steps 1, or " +
                      std::string(bonus ? "leave entropy_coef out" : "choose another loss_type"));
    if (!parts && (loss_.by_micro_batch || bonus))
      notes_.push_back((bonus ? std::string("the entropy bonus") : type) +
                       " is a mean over the tokens of the mini-batch, as in TRL with one micro-batch");
    if (!loss_.by_items) {
      if (parts || steps) set("token-divisor-scale", "0");
      if (items) notes_.push_back(items->where + "num_items_in_batch is not used by TRL's loss_type " + type);
      return;
    }
    if (parts || steps) {
      set("token-divisor-scale", number_text(scale));
      notes_.push_back("num_items_in_batch is multiplied by gradient_accumulation_steps / steps_per_generation, " +
                       number_text(scale));
    }
    if (items) {
      const double divides_by = scale * parse_number(items->value, items->where + "--num-items-in-batch", "a number");
      replace(*items, "token-mean-divisor", number_text(divides_by));
    }
  }

  void clipping() {
    const std::string epsilon = value_of("epsilon", "0.2"), type = loss_.type;
    const std::string high = is_none(value_of("epsilon_high", "none")) ? epsilon : value_of("epsilon_high", epsilon);
    if (const OptionSetting* level = take("importance_sampling_level")) {
      expect_one_of(*level, {"token", "sequence"});
      if (level->value == "sequence" && type == "vespo")
        unsupported(*level, "vespo already has one weight per sequence", "leave importance_sampling_level out");
      replace(*level, "ratio-level", level->value);
    }
    if (const OptionSetting* delta = take("delta"); delta && !is_none(delta->value)) {
      if (!loss_.takes_delta) unsupported(*delta, "delta is not used by TRL's " + type, "leave it out");
      replace(*delta, "ratio-cap", delta->value);
    }
    if (type == "cispo") {  // epsilon_high is the cap itself, and there is no lower one
      const OptionSetting* named = take("epsilon_high") ? take("epsilon_high") : take("epsilon");
      const double cap = parse_number(high, (named ? named->where : "") + std::string("--epsilon-high"), "a number");
      set("clip-ratio-low", "1");
      set("clip-ratio-high", number_text(cap - 1));
      notes_.push_back("cispo: the ratio is capped at epsilon_high itself, " + high + ", as in TRL");
      return;
    }
    if (const OptionSetting* given = take("epsilon")) replace(*given, "clip-ratio-low", epsilon);
    if (const OptionSetting* given = take("epsilon_high") ? take("epsilon_high") : take("epsilon"))
      replace(*given, "clip-ratio-high", high);
  }

  void kl() {
    pass("beta", "kl-loss-coef");
    if (const OptionSetting* given = take("use_bias_correction_kl"))
      replace(*given, "kl-loss-type", flag("use_bias_correction_kl", true) ? "k3_unbiased" : "k3_unbounded");
  }

  void rewards() {
    if (const OptionSetting* given = take("scale_rewards")) {
      expect_one_of(*given, {"group", "batch", "none", "true", "True", "false", "False"});
      const bool none = given->value == "none" || given->value == "false" || given->value == "False";
      replace(*given, "adv-estimator", none ? "dr_grpo" : "grpo");
      if (given->value == "batch") replace(*given, "adv-std", "batch");
    }
    const bool divides = std::string_view(loss_.type) == "dr_grpo";
    if (const OptionSetting* length = take("max_completion_length")) {
      replace(*length, "max-response-length", length->value);
      if (divides) replace(*length, "loss-scale-factor", length->value);
    } else if (divides) {
      imply("loss-scale-factor", "512");
      notes_.push_back("dr_grpo divides by max_completion_length, TRL's default is 512");
    }
  }

  void sampling_weights() {
    const std::string prefix = "vllm_importance_sampling_";
    const OptionSetting* mode = take(prefix + "mode");
    const OptionSetting* most = take(prefix + "clip_max") ? take(prefix + "clip_max") : take(prefix + "cap");
    const OptionSetting* least = take(prefix + "clip_min");
    const bool named = mode || most || least || take(prefix + "correction");
    if (!named || !flag(prefix + "correction", true)) return;
    if (mode) expect_one_of(*mode, {"token_truncate", "token_mask", "sequence_truncate", "sequence_mask"});
    const std::string how = mode ? mode->value : "sequence_mask";
    const std::size_t cut = how.find('_');
    set("rollout-is", how.substr(0, cut));
    set("rollout-is-mode", how.substr(cut + 1));
    set("rollout-is-threshold", !most ? "3" : is_none(most->value) ? "inf" : most->value);
    if (least && !is_none(least->value)) set("rollout-is-floor", least->value);
    notes_.push_back("TRL's vllm_importance_sampling_mode read as --rollout-is " + how.substr(0, cut) +
                     " --rollout-is-mode " + how.substr(cut + 1));
  }

  void vespo() {
    const std::pair<const char*, const char*> parts[] = {
        {"vespo_k_pos", "2"}, {"vespo_lambda_pos", "3"}, {"vespo_k_neg", "3"}, {"vespo_lambda_neg", "2"}};
    std::string weights;
    const OptionSetting* any = nullptr;
    for (const auto& [name, absent] : parts) {
      if (take(name)) any = take(name);
      weights += (weights.empty() ? "" : ",") + value_of(name, absent);
    }
    if (any) replace(*any, "vespo-weights", weights);
  }

  std::map<std::string, const OptionSetting*> given_;
  TrlLoss loss_{};
  std::vector<OptionSetting> out_;
  std::vector<std::string>& notes_;
};

}  // namespace

bool is_alias(std::string_view name) {
  return name_table().contains(underscored(name)) || peft_names().contains(underscored(name)) ||
         refused_peft_name(name) != nullptr;
}

std::vector<std::string> trl_names() {
  std::vector<std::string> names;
  for (const auto& [name, targets] : name_table()) names.push_back(name);
  return names;
}

std::vector<std::string> alias_names() {
  std::vector<std::string> names = trl_names();
  for (const auto& [name, option] : peft_names()) names.push_back(name);
  for (const RefusedPeftName& refused : refused_peft_names()) names.emplace_back(refused.name);
  return names;
}

std::vector<std::string> alias_targets(std::string_view name) {
  const auto found = name_table().find(underscored(name));
  if (found != name_table().end()) return found->second;
  if (const RefusedPeftName* const refused = refused_peft_name(name)) return {refused->option};
  const auto renamed = peft_names().find(underscored(name));
  return renamed == peft_names().end() ? std::vector<std::string>{} : std::vector<std::string>{renamed->second};
}

std::vector<OptionSetting> translate_trl_names(const std::vector<OptionSetting>& settings,
                                               std::vector<std::string>& notes) {
  return Translation(settings, notes).settings();
}

}  // namespace espalier
