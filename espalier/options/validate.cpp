// Rules between options (their meanings: docs/options.md and the objective).
#include <cmath>

#include "espalier/base/error.h"
#include "espalier/options/objective_options.h"
#include "espalier/options/options.h"
#include "espalier/options/token_rules.h"

namespace espalier {
namespace {

void check_objective(const Options& options) {
  policy_aggregation(options);
  if (options.loss_scale_factor > 0 && options.loss_agg_mode != Aggregation::seq_mean_token_sum_norm)
    throw OptionError({"--loss-scale-factor", "--loss-agg-mode seq-mean-token-sum-norm, the mode that divides by it",
                       text_of('"', options.loss_agg_mode, '"'), "use that mode or leave --loss-scale-factor out"});
}

// The losses for which the row says so: "vanilla, gspo".
std::string losses_with(bool (*has)(const PolicyLossRow&)) {
  std::string out;
  for (std::size_t loss = 0; loss < words_of(PolicyLoss{}).size(); ++loss)
    if (has(row_of(static_cast<PolicyLoss>(loss))))
      out.append(out.empty() ? "" : ", ").append(words_of(PolicyLoss{})[loss]);
  return out;
}

void check_token_rules(const Options& options) {
  const PolicyLossRow& loss = row_of(options.policy_loss);
  for (const TokenRuleRow& rule : token_rule_rows())
    if (rule.holds(options) && rule.ratio == RuleRatio::old && loss.compares_sampler)
      throw OptionError(
          {text_of("--", rule.option),
           text_of("no such option with --policy-loss ", options.policy_loss, ", whose ratio is that to the sampler"),
           option_text(options, rule.option), text_of("leave --", rule.option, " out")});
  const RolloutCorrection correction = options.rollout_is;
  if (loss.weights == LossWeights::inside && correction != RolloutCorrection::none &&
      correction != RolloutCorrection::token)
    throw OptionError(
        {"--rollout-is",
         text_of("none or token with --policy-loss ", options.policy_loss, ", which uses one weight per token"),
         name_of(correction), ""});
}

void check_ratios(const Options& options) {
  const PolicyLoss loss = options.policy_loss;
  const PolicyLossRow& row = row_of(loss);
  if (options.ratio_level == RatioLevel::sequence && row.sequence_ratio == SequenceRatio::none)
    throw OptionError({"--ratio-level", text_of("token with --policy-loss ", options.policy_loss),
                       name_of(RatioLevel::sequence), "leave --ratio-level out, or choose another --policy-loss"});
  if (std::isfinite(options.ratio_cap) && !row.takes_cap)
    throw OptionError({"--ratio-cap",
                       text_of("a --policy-loss whose unclipped branch it caps: ",
                               losses_with([](const PolicyLossRow& each) { return each.takes_cap; })),
                       name_of(loss), "leave --ratio-cap out"});
  const RolloutCorrection correction = options.rollout_is;
  if (row.compares_sampler && options.kl_loss_type == KlLossType::k3_unbiased && options.kl_loss_coef != 0)
    throw OptionError({"--kl-loss-type",
                       text_of("an estimator without the ratio to the old policy with --policy-loss ", name_of(loss)),
                       name_of(options.kl_loss_type), "give --kl-loss-type k3_unbounded"});
  if (correction == RolloutCorrection::seq_mask_tis && options.rollout_is_mode != OutOfBounds::truncate)
    throw OptionError({"--rollout-is-mode",
                       "no such option with --rollout-is seq-mask-tis, which always drops sequences",
                       name_of(options.rollout_is_mode), "leave --rollout-is-mode out"});
  if (options.icepop_ratio_low > options.icepop_ratio_high)
    throw OptionError({"--icepop-ratio-low", "a number not above --icepop-ratio-high",
                       text_of(options.icepop_ratio_low, ", and ", options.icepop_ratio_high), ""});
  if (options.rollout_is_floor >= options.rollout_is_threshold)
    throw OptionError({"--rollout-is-floor", "a number below --rollout-is-threshold",
                       text_of(options.rollout_is_floor, ", and ", options.rollout_is_threshold), ""});
  if (parse_numbers("--vespo-weights", options.vespo_weights).size() != 4)
    throw OptionError({"--vespo-weights",
                       "four numbers: k and lambda for advantages of at least 0, then for those below 0",
                       options.vespo_weights, ""});
  if (options.token_mean_divisor > 0 && policy_aggregation(options) != Aggregation::token_mean)
    throw OptionError({"--token-mean-divisor", "--loss-agg-mode token-mean", name_of(policy_aggregation(options)),
                       "leave --token-mean-divisor out"});
}

void check_adapters(const Options& options) {
  if (options.lora_dropout > 0)
    throw UnsupportedError({"--lora-dropout", "0, because a shared row must be the same in every rollout",
                            text_of(options.lora_dropout), "leave --lora-dropout out"});
}

}  // namespace

Aggregation policy_aggregation(const Options& options) {
  const PolicyLossRow& row = row_of(options.policy_loss);
  if (options.loss_agg_mode == Aggregation::of_the_loss) return row.by_default;
  if (!row.any_aggregation && options.loss_agg_mode != row.by_default)
    throw OptionError(
        {"--loss-agg-mode", text_of(name_of(row.by_default), ", the only mode of --policy-loss ", options.policy_loss),
         text_of('"', options.loss_agg_mode, '"'), "leave --loss-agg-mode out, or choose another --policy-loss"});
  return options.loss_agg_mode;
}

void validate(const Options& options) {
  check_objective(options);
  check_objective_kind(options);
  check_token_rules(options);
  check_ratios(options);
  check_adapters(options);
  const std::size_t betas = parse_numbers("--betas", options.betas).size();
  if (betas != 2)
    throw OptionError({"--betas", "two numbers, for the first and the second moment", text_of(betas), ""});
}

}  // namespace espalier
