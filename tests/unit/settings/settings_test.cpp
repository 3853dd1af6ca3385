// TRL's names and settings from several sources.
#include "espalier/settings/trl_names.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "espalier/options/options_json.h"
#include "espalier/settings/peft_names.h"
#include "tests/unit/options/thrown_error.h"

namespace espalier {
namespace {

// The defaults after settings of one source, with the number of notes.
struct Applied {
  Options options;
  std::vector<std::string> notes;
};
Applied applied(const std::vector<OptionSetting>& settings) {
  Applied result;
  apply_settings(result.options, settings, result.notes);
  return result;
}

TEST(Aliases, EpsilonSetsBothSidesUnlessEpsilonHighIsGiven) {
  Applied both = applied({{"epsilon", "0.1", ""}});
  EXPECT_EQ(both.options.clip_ratio_low, 0.1);
  EXPECT_EQ(both.options.clip_ratio_high, 0.1);
  EXPECT_FALSE(both.notes.empty());
  for (const char* high : {"epsilon_high", "epsilon-high"}) {
    Applied apart = applied({{high, "0.28", ""}, {"epsilon", "0.1", ""}});
    EXPECT_EQ(apart.options.clip_ratio_low, 0.1);
    EXPECT_EQ(apart.options.clip_ratio_high, 0.28);
  }
  Applied high_alone = applied({{"epsilon_high", "0.28", ""}});
  EXPECT_EQ(high_alone.options.clip_ratio_low, Options{}.clip_ratio_low);
  EXPECT_EQ(high_alone.options.clip_ratio_high, 0.28);
}

TEST(Aliases, AnyOfThemMakesTheUpdateTrls) {
  const Options options = applied({{"beta", "0.04", ""}}).options;
  EXPECT_EQ(options.kl_loss_coef, 0.04);
  EXPECT_EQ(options.kl_loss_type, "k3_unbiased");
  EXPECT_TRUE(std::isinf(options.clip_ratio_c) && std::isinf(options.log_ratio_bound));
  EXPECT_EQ(options.adv_epsilon, 1e-4);
  EXPECT_EQ(options.group_of_one, LoneReward::zero);
  EXPECT_EQ(options.loss_agg_mode, "token-mean");
  EXPECT_EQ(options.entropy_agg_mode, "token-mean");
  EXPECT_EQ(options.weight_decay, 0);
  EXPECT_EQ(applied({{"use_bias_correction_kl", "False", ""}}).options.kl_loss_type, "k3_unbounded");
}

TEST(Aliases, WhatAnEarlierSourceSetStaysButForWhatTheySayThemselves) {
  Applied result = applied({{"clip-ratio-c", "4", ""}, {"clip-ratio-high", "0.5", ""}, {"weight-decay", "0.3", ""}});
  apply_settings(result.options, {{"epsilon", "0.1", ""}}, result.notes);
  EXPECT_EQ(result.options.clip_ratio_c, 4);
  EXPECT_EQ(result.options.weight_decay, 0.3);
  EXPECT_EQ(result.options.clip_ratio_high, 0.1);
  EXPECT_TRUE(std::isinf(result.options.log_ratio_bound));
}

TEST(Aliases, DeltaCapsTheRatioOfTheUnclippedBranch) {
  EXPECT_EQ(applied({{"delta", "1.1", ""}}).options.ratio_cap, 1.1);
  EXPECT_TRUE(std::isinf(applied({{"delta", "None", ""}}).options.ratio_cap));
  EXPECT_THROW(applied({{"delta", "2", ""}, {"loss_type", "sapo", ""}}), UnsupportedError);
}

TEST(Aliases, LossTypeNamesLossAndAggregation) {
  const std::vector<std::array<const char*, 3>> expected = {
      {"grpo", "vanilla", "seq-mean-token-mean"}, {"dapo", "vanilla", "token-mean"},
      {"bnpo", "vanilla", "token-mean"},          {"dr_grpo", "vanilla", "seq-mean-token-sum-norm"},
      {"luspo", "vanilla", "seq-mean-token-sum"}, {"cispo", "cispo", "token-mean"},
      {"sapo", "sapo", "seq-mean-token-mean"},    {"vespo", "vespo", "token-mean"}};
  for (const auto& [type, loss, mode] : expected) {
    const Options options = applied({{"loss_type", type, ""}}).options;
    EXPECT_EQ(options.policy_loss, loss) << type;
    EXPECT_EQ(options.loss_agg_mode, mode) << type;
    EXPECT_NO_THROW(validate(options)) << type;
  }
  EXPECT_THROW(applied({{"loss_type", "ppo", ""}}), OptionError);
}

TEST(Aliases, CispoCapsTheRatioAtEpsilonHighItself) {
  const Options options =
      applied({{"loss_type", "cispo", ""}, {"epsilon_high", "5", ""}, {"epsilon", "0.2", ""}}).options;
  EXPECT_EQ(options.clip_ratio_low, 1);
  EXPECT_EQ(options.clip_ratio_high, 4);
  EXPECT_DOUBLE_EQ(applied({{"loss_type", "cispo", ""}}).options.clip_ratio_high, -0.8);  // TRL's default cap is 0.2
}

TEST(Aliases, DrGrpoDividesByTheLongestCompletionThatTrlAllows) {
  EXPECT_EQ(applied({{"loss_type", "dr_grpo", ""}}).options.loss_scale_factor, 512);
  EXPECT_EQ(applied({{"loss_type", "dr_grpo", ""}, {"max_completion_length", "64", ""}}).options.loss_scale_factor, 64);
  EXPECT_EQ(applied({{"max_completion_length", "64", ""}}).options.loss_scale_factor, 0);
}

TEST(Aliases, NumItemsInBatchIsRescaledToOneWindow) {
  const auto sharded = [](const char* type, const char* parts, const char* steps) {
    return applied({{"loss_type", type, ""},
                    {"num_items_in_batch", "120", ""},
                    {"gradient_accumulation_steps", parts, ""},
                    {"steps_per_generation", steps, ""}})
        .options;
  };
  EXPECT_EQ(sharded("dapo", "2", "3").token_mean_divisor, 80);
  EXPECT_EQ(sharded("cispo", "1", "4").token_divisor_scale, 0.25);
  EXPECT_EQ(sharded("vespo", "2", "None").token_mean_divisor, 120);  // TRL's default is gradient_accumulation_steps
  EXPECT_EQ(sharded("grpo", "2", "4").token_mean_divisor, 0);
  EXPECT_EQ(sharded("grpo", "2", "4").token_divisor_scale, 0);
  EXPECT_EQ(sharded("bnpo", "1", "4").token_divisor_scale, 0);
  EXPECT_EQ(applied({{"loss_type", "dapo", ""}}).options.token_divisor_scale, -1);
  EXPECT_THROW(sharded("bnpo", "2", "4"), UnsupportedError);
  EXPECT_THROW(sharded("dapo", "0", "4"), OptionError);
  EXPECT_THROW(applied({{"entropy_coef", "0.1", ""}, {"gradient_accumulation_steps", "2", ""}}), UnsupportedError);
}

TEST(Aliases, ScaleRewardsNamesEstimatorAndDeviation) {
  for (const char* value : {"group", "true", "True"})
    EXPECT_EQ(applied({{"scale_rewards", value, ""}}).options.adv_estimator, "grpo") << value;
  for (const char* value : {"none", "false", "False"})
    EXPECT_EQ(applied({{"scale_rewards", value, ""}}).options.adv_estimator, "dr_grpo") << value;
  EXPECT_EQ(applied({{"scale_rewards", "batch", ""}}).options.adv_std, "batch");
  EXPECT_THROW(applied({{"scale_rewards", "often", ""}}), OptionError);
}

TEST(Aliases, WeightsOfTheSampledPolicyComeOnlyWhenNamed) {
  EXPECT_EQ(applied({{"beta", "0.1", ""}}).options.rollout_is, "none");
  const Options options = applied({{"vllm_importance_sampling_correction", "true", ""}}).options;
  EXPECT_EQ(options.rollout_is, "sequence");
  EXPECT_EQ(options.rollout_is_mode, "mask");
  EXPECT_EQ(options.rollout_is_threshold, 3);
  EXPECT_EQ(applied({{"vllm_importance_sampling_correction", "false", ""}}).options.rollout_is, "none");
  const Options cut = applied({{"vllm_importance_sampling_mode", "token_truncate", ""},
                               {"vllm_importance_sampling_clip_min", "0.5", ""},
                               {"vllm_importance_sampling_clip_max", "None", ""}})
                          .options;
  EXPECT_EQ(cut.rollout_is, RolloutCorrection::token);
  EXPECT_EQ(cut.rollout_is_mode, OutOfBounds::truncate);
  EXPECT_EQ(cut.rollout_is_floor, 0.5);
  EXPECT_TRUE(std::isinf(cut.rollout_is_threshold));
}

TEST(Aliases, WhatHasNoCounterpartIsRefusedByName) {
  for (const OptionSetting& setting :
       std::vector<OptionSetting>{{"top_entropy_quantile", "0.2", ""},
                                  {"use_adaptive_entropy", "true", ""},
                                  {"multi_objective_aggregation", "normalize_then_sum", ""},
                                  {"mask_truncated_completions", "true", ""}}) {
    const ErrorText text = testing::thrown_error<UnsupportedError>([&] { applied({setting}); });
    EXPECT_EQ(text.where, "--" + setting.name);
  }
  EXPECT_NO_THROW(applied({{"top_entropy_quantile", "1.0", ""}, {"use_adaptive_entropy", "false", ""}}));
}

TEST(Settings, OwnNamesWinOverAliasesOfOneSource) {
  EXPECT_EQ(applied({{"clip-ratio-low", "0.3", ""}, {"epsilon", "0.1", ""}}).options.clip_ratio_low, 0.3);
}

TEST(Settings, TheLastOfTwoWins) {
  EXPECT_EQ(applied({{"lr", "1", ""}, {"lr", "2", ""}}).options.lr, 2);
  EXPECT_EQ(applied({{"beta", "1", ""}, {"beta", "2", ""}}).options.kl_loss_coef, 2);
}

TEST(Settings, ALaterSourceWins) {
  Applied result = applied({{"lr", "1", "run.toml:1: "}});
  apply_settings(result.options, {{"lr", "2", ""}}, result.notes);
  EXPECT_EQ(result.options.lr, 2);
}

TEST(Aliases, AWrongValueIsReportedUnderEspaliersName) {
  const ErrorText text = testing::thrown_error<OptionError>([] { applied({{"epsilon", "two", "run.toml:4: "}}); });
  EXPECT_EQ(text.where, "run.toml:4: --clip-ratio-low");
}

TEST(PeftNames, EachIsAnotherNameOfOneOptionAndChangesNothingElse) {
  const std::pair<const char*, const char*> values[] = {{"lora_r", "8"},
                                                        {"target_modules", "q_proj,v_proj"},
                                                        {"lora_target_modules", "q_proj,v_proj"},
                                                        {"target_parameters", "experts.down_proj"},
                                                        {"lora_target_parameters", "experts.down_proj"},
                                                        {"lora_adapter_path", "some/folder"},
                                                        {"modules_to_save", "lm_head"},
                                                        {"lora_modules_to_save", "lm_head"}};
  ASSERT_EQ(std::size(values), peft_names().size());
  for (const auto& [name, value] : values) {
    ASSERT_TRUE(peft_names().contains(name)) << name;
    const std::string option = peft_names().at(name);
    std::string dashed = name;
    std::ranges::replace(dashed, '_', '-');
    for (const std::string& spelling : {std::string(name), dashed}) {
      const Applied renamed = applied({{spelling, value, ""}}), own = applied({{option, value, ""}});
      EXPECT_EQ(options_to_json(renamed.options, 't'), options_to_json(own.options, 't')) << spelling;
      EXPECT_EQ(renamed.notes.size(), 1u) << spelling;
    }
  }
}

TEST(PeftNames, ListsOfPythonAndHydraAreReadAsOurs) {
  for (const char* list : {"[q_proj, v_proj]", "['q_proj','v_proj']", "[\"q_proj\", \"v_proj\"]", "q_proj,v_proj"})
    EXPECT_EQ(applied({{"target_modules", list, ""}}).options.lora_target, "q_proj,v_proj") << list;
  EXPECT_EQ(applied({{"modules_to_save", "None", ""}}).options.train, "all");
  EXPECT_EQ(applied({{"lora_adapter_path", "null", ""}}).options.adapter, "");
}

TEST(PeftNames, TargetsOfModulesAndOfParametersAreOneList) {
  const OptionSetting modules{"target_modules", "[q_proj, v_proj]", ""},
      parameters{"target_parameters", "['mlp.gate.weight', 'mlp.experts.gate_up_proj']", ""};
  EXPECT_EQ(applied({modules, parameters}).options.lora_target, "q_proj,v_proj,mlp.gate,mlp.experts.gate_up_proj");
  EXPECT_EQ(applied({parameters, modules}).options.lora_target, "mlp.gate,mlp.experts.gate_up_proj,q_proj,v_proj");
  EXPECT_EQ(applied({modules, {"target_parameters", "null", ""}}).options.lora_target, "q_proj,v_proj");
  EXPECT_EQ(applied({{"lora_target_modules", "None", ""}}).options.lora_target, "all-linear");
}

TEST(PeftNames, SettingsWithoutAnOptionAreRefusedByNameUnlessTheyAreOff) {
  for (const RefusedPeftName& refused : refused_peft_names()) {
    for (const char* off : {"null", "None", "false", "[]", "{}"})
      EXPECT_EQ(options_to_json(applied({{std::string(refused.name), off, ""}}).options, 't'),
                options_to_json(Options(), 't'))
          << refused.name << " " << off;
    const ErrorText text = testing::thrown_error<UnsupportedError>([&] {
      applied({{std::string(refused.name), "[k_proj]", "run.toml:4: "}});
    });
    EXPECT_EQ(text.where, text_of("run.toml:4: ", refused.name));
    EXPECT_NE(text.remedy, "");
  }
}

TEST(PeftNames, OursWinWhereBothAreGiven) {
  EXPECT_EQ(applied({{"lora-rank", "4", ""}, {"lora_r", "8", ""}}).options.lora_rank, 4);
}

}  // namespace
}  // namespace espalier
