#include "espalier/hosting/datum_rollouts.h"

#include <utility>

#include "espalier/base/error.h"

namespace espalier {
namespace {

DatumLossKind kind_of(serve::LossName loss) {
  switch (loss) {
    case serve::LossName::cross_entropy:
      return DatumLossKind::cross_entropy;
    case serve::LossName::importance_sampling:
      return DatumLossKind::importance_sampling;
    case serve::LossName::ppo:
      return DatumLossKind::ppo;
    case serve::LossName::cispo:
      return DatumLossKind::cispo;
    case serve::LossName::dro:
      return DatumLossKind::dro;
    case serve::LossName::gspo:
      return DatumLossKind::gspo;
  }
  ESPALIER_INTERNAL(false, "a loss without a formula");
  return {};
}

std::vector<double> doubles(const std::vector<float>& values) { return {values.begin(), values.end()}; }

Rollout rollout_of(const serve::TrainingDatum& datum, std::size_t index) {
  Rollout out;
  out.prompt_ids = datum.tokens;
  out.given_targets = {datum.targets, datum.columns};
  out.loss_mask.assign(datum.targets.size(), 1);
  out.index = static_cast<std::int64_t>(index);
  out.where = text_of("datum ", index);
  return out;
}

DatumTerms terms_of(const serve::TrainingCall& call, const serve::TrainingDatum& datum) {
  DatumTerms out;
  out.kind = kind_of(call.loss);
  out.weight = doubles(datum.weight);
  out.old_logprob = doubles(datum.old_logprob);
  for (const float value : datum.in_mean) out.in_mean.push_back(value != 0);
  out.ratio_low = datum.low.empty() ? std::vector{call.low} : doubles(datum.low);
  out.ratio_high = datum.high.empty() ? std::vector{call.high} : doubles(datum.high);
  out.beta = call.beta;
  return out;
}

}  // namespace

DatumRollouts::DatumRollouts(const std::vector<const serve::TrainingCall*>& calls) {
  for (const serve::TrainingCall* call : calls)
    for (std::size_t i = 0; i < call->data.size(); ++i) {
      rollouts.push_back(rollout_of(call->data[i], i));
      terms.push_back(terms_of(*call, call->data[i]));
    }
}

}  // namespace espalier
