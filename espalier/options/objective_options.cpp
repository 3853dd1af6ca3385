#include "espalier/options/objective_options.h"

#include "espalier/base/error.h"
#include "espalier/options/token_rules.h"

namespace espalier {

void check_objective_kind(const Options& options) {
  if (options.center_rewards_coefficient > 0 && options.objective != ObjectiveKind::reward)
    throw OptionError({"--center-rewards-coefficient", "--objective reward with it", name_of(options.objective),
                       "leave --center-rewards-coefficient out"});
  if (options.objective == ObjectiveKind::grpo) return;
  const std::string with = text_of(" with --objective ", options.objective);
  const auto refuse = [&](bool given, const std::string& name, const std::string& got) {
    if (given) throw OptionError({name, text_of("no such option", with), got, text_of("leave ", name, " out")});
  };
  refuse(options.policy_loss != PolicyLoss::vanilla && options.policy_loss != PolicyLoss::reinforce, "--policy-loss",
         name_of(options.policy_loss));
  for (const TokenRuleRow& rule : token_rule_rows())
    if (rule.holds(options)) refuse(true, text_of("--", rule.option), option_text(options, rule.option));
  refuse(!options.rollout_rs.empty(), "--rollout-rs", options.rollout_rs);
  refuse(options.kl_loss_coef != 0, "--kl-loss-coef", text_of(options.kl_loss_coef));
  refuse(!options.critic.empty(), "--critic", options.critic);
  if (options.objective == ObjectiveKind::sft) return;
  refuse(options.entropy_coeff != 0, "--entropy-coeff", text_of(options.entropy_coeff));
  refuse(options.loss_agg_mode != Aggregation::of_the_loss && options.loss_agg_mode != Aggregation::token_sum,
         "--loss-agg-mode", name_of(options.loss_agg_mode));
  refuse(options.loss_unit == LossUnit::trajectory, "--loss-unit", name_of(options.loss_unit));
  refuse(!options.record.empty(), "--record", options.record);
  refuse(!options.rollout_metrics.empty(), "--rollout-metrics", options.rollout_metrics);
  if (options.objective == ObjectiveKind::reward) {
    refuse(!options.logprobs.empty(), "--logprobs", options.logprobs);
    refuse(!options.ref_model.empty(), "--ref-model", options.ref_model);
    refuse(options.router_aux_loss_coef != 0, "--router-aux-loss-coef", text_of(options.router_aux_loss_coef));
    refuse(options.router_z_loss_coef != 0, "--router-z-loss-coef", text_of(options.router_z_loss_coef));
    return;
  }
  const bool smooth = options.dpo_loss == DpoLoss::sigmoid || options.dpo_loss == DpoLoss::robust;
  if (options.label_smoothing > 0 && !smooth)
    throw OptionError({"--label-smoothing", "--dpo-loss sigmoid or robust with it", name_of(options.dpo_loss),
                       "leave --label-smoothing out"});
  if (options.reference_free && !options.ref_model.empty())
    throw OptionError({"--ref-model", "no --reference-free beside it", options.ref_model, "leave one of them out"});
}

void settle_objective(Options& options) {
  if (options.objective == ObjectiveKind::grpo || options.objective == ObjectiveKind::reward) return;
  options.policy_loss = name_of(PolicyLoss::reinforce);
  if (options.objective == ObjectiveKind::dpo) options.loss_agg_mode = name_of(Aggregation::token_sum);
}

}  // namespace espalier
