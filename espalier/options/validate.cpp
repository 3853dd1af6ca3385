// Rules between options (the meanings are those of docs/options.md and of the objective).
#include "espalier/base/error.h"
#include "espalier/options/options.h"

namespace espalier {
namespace {

void check_objective(const Options& options) {
  const std::string per_sequence = "seq-mean-token-mean";
  if (options.policy_loss == "sapo" && !options.loss_agg_mode.empty() && options.loss_agg_mode != per_sequence)
    throw OptionError({"--loss-agg-mode", per_sequence + ", the only mode of --policy-loss sapo",
                       '"' + options.loss_agg_mode + '"', "leave --loss-agg-mode out"});
  if (options.loss_scale_factor > 0 && options.loss_agg_mode != "seq-mean-token-sum-norm")
    throw OptionError({"--loss-scale-factor",
                       "--loss-agg-mode seq-mean-token-sum-norm with it, the mode that divides by it",
                       '"' + options.loss_agg_mode + '"', "give that mode or leave --loss-scale-factor out"});
}

}  // namespace

void validate(const Options& options) {
  check_objective(options);
  const std::size_t betas = parse_numbers("--betas", options.betas).size();
  if (betas != 2)
    throw OptionError({"--betas", "two numbers, for the first and the second moment", text_of(betas), ""});
}

}  // namespace espalier
