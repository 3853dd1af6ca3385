// Rules between options (the meanings are those of docs/options.md and of the objective).
#include "espalier/base/error.h"
#include "espalier/options/options.h"

namespace espalier {
namespace {

void check_objective(const Options& options) {
  policy_aggregation(options);
  if (options.loss_scale_factor > 0 && options.loss_agg_mode != Aggregation::seq_mean_token_sum_norm)
    throw OptionError({"--loss-scale-factor",
                       "--loss-agg-mode seq-mean-token-sum-norm with it, the mode that divides by it",
                       text_of('"', options.loss_agg_mode, '"'), "give that mode or leave --loss-scale-factor out"});
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
  const std::size_t betas = parse_numbers("--betas", options.betas).size();
  if (betas != 2)
    throw OptionError({"--betas", "two numbers, for the first and the second moment", text_of(betas), ""});
}

}  // namespace espalier
