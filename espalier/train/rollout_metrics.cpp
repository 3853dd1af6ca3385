#include "espalier/train/rollout_metrics.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "espalier/base/json.h"
#include "espalier/objective/denominator.h"
#include "espalier/objective/kl.h"
#include "espalier/objective/objective.h"
#include "espalier/rollout/json_text.h"

namespace espalier {
namespace {

using Cells = std::vector<std::pair<const char*, std::string>>;  // name and JSON text; "null" where there is none

std::string number(double value) {
  if (!std::isfinite(value)) return "null";
  std::string out;
  append_number(out, value);
  return out;
}

// `value(t)` over the loss tokens of a rollout.
template <class Value>
double mean_over(const Rollout& rollout, Value&& value) {
  double sum = 0, tokens = 0;
  for (std::size_t t = 0; t < rollout.loss_mask.size(); ++t)
    if (rollout.loss_mask[t]) sum += value(t), tokens += 1;
  return sum / tokens;
}

std::string id_of(const Rollout& rollout) {
  if (rollout.carried.empty()) return "null";
  const Json carried = Json::parse(rollout.carried);
  return carried.contains("id") ? carried["id"].dump() : "null";
}

Cells cells_of(const Options& options, std::int64_t step, const Rollout& rollout, const std::vector<double>& advantages,
               const RolloutSeries& series, std::int64_t batch_loss_tokens, const LossParts& before,
               const LossParts& after) {
  const std::vector<double>& old = rollout.old_logprobs.empty() ? series.logprob : rollout.old_logprobs;
  const auto log_ratio = [&](std::size_t t) { return series.logprob[t] - old[t]; };
  double largest = -std::numeric_limits<double>::infinity();
  for (std::size_t t = 0; t < rollout.loss_mask.size(); ++t)
    if (rollout.loss_mask[t]) largest = std::max(largest, std::exp(log_ratio(t)));
  const std::int64_t loss_tokens = after.loss_tokens - before.loss_tokens;
  const double clipped = (after.clip_fraction - before.clip_fraction) * static_cast<double>(batch_loss_tokens);
  const KlType k3;
  Cells out = {{"step", std::to_string(step)},
               {"index", std::to_string(rollout.index)},
               {"id", id_of(rollout)},
               {"group", rollout.group.empty() ? "null" : rollout.group},
               {"reward", rollout.reward ? number(*rollout.reward) : "null"},
               {"advantage", number(mean_over(rollout, [&](std::size_t t) { return advantages[t]; }))},
               {"loss", number(after.loss - before.loss)},
               {"ratio", number(mean_over(rollout, [&](std::size_t t) { return std::exp(log_ratio(t)); }))},
               {"ratio_max", number(largest)},
               {"clip_fraction", number(std::round(clipped) / static_cast<double>(loss_tokens))},
               {"old_kl", number(mean_over(rollout, [&](std::size_t t) { return -log_ratio(t); }))}};
  const auto to_reference = [&](std::size_t t) {
    return kl_term(k3, series.logprob[t], rollout.ref_logprobs[t]).value;
  };
  out.emplace_back("kl", rollout.ref_logprobs.empty() ? "null" : number(mean_over(rollout, to_reference)));
  out.emplace_back("entropy", number(mean_over(rollout, [&](std::size_t t) { return series.entropy[t]; })));
  out.emplace_back("logprob", number(mean_over(rollout, [&](std::size_t t) { return series.logprob[t]; })));
  out.emplace_back("tokens", std::to_string(rollout.response_length()));
  out.emplace_back("loss_tokens", std::to_string(loss_tokens));
  for (std::size_t i = 0; i < kTokenRules; ++i) {
    const TokenRuleRow& rule = token_rule_rows()[i];
    if (!rule.reports() || !rule.holds(options)) continue;
    const double sum = (after.rules[i].mean - before.rules[i].mean) * static_cast<double>(batch_loss_tokens);
    out.emplace_back(rule.metric, number(sum / static_cast<double>(loss_tokens)));
  }
  return out;
}

// A cell of CSV by RFC 4180: strings without JSON's quotes, in quotes of their own where they need some.
std::string csv_cell(const std::string& json) {
  if (json == "null") return "";
  const std::string text = json.starts_with('"') ? Json::parse(json).get<std::string>() : json;
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string out = "\"";
  for (const char c : text) out.append(c == '"' ? 2 : 1, c);
  return out + '"';
}

}  // namespace

RolloutMetrics::RolloutMetrics(const std::string& path, const Options& options)
    : options_(options), csv_(path.ends_with(".csv")), file_(path) {
  if (!csv_) return;
  std::string head;
  for (const auto& [name, text] : cells_of(options, 0, {}, {}, {}, 0, {}, {}))
    head.append(head.empty() ? "" : ",").append(name);
  file_.write(head + "\n");
}

void RolloutMetrics::add(std::int64_t step, const MiniBatch& mini_batch, std::span<const RolloutSeries> series) {
  const std::int64_t loss_tokens = count_loss_tokens(mini_batch.rollouts);
  Objective objective(mini_batch.rollouts, mini_batch.advantages, options_);
  if (objective.needs_sequences()) {
    TokenSeries logprobs;
    for (const RolloutSeries& each : series) logprobs.push_back(each.logprob);
    objective.settle_sequences(logprobs);
  }
  for (std::size_t i = 0; i < mini_batch.rollouts.size(); ++i) {
    std::vector<double> grad_logprob(series[i].logprob.size()), grad_entropy(series[i].logprob.size());
    const LossParts before = objective.parts();
    objective.add_rollout(static_cast<std::int32_t>(i), series[i].logprob, series[i].entropy, grad_logprob,
                          grad_entropy);
    std::string line;
    for (const auto& [name, text] : cells_of(options_, step, mini_batch.rollouts[i], mini_batch.advantages[i],
                                             series[i], loss_tokens, before, objective.parts())) {
      line += line.empty() ? (csv_ ? "" : "{") : (csv_ ? "," : ", ");
      line += csv_ ? csv_cell(text) : '"' + std::string(name) + "\": " + text;
    }
    file_.write(line + (csv_ ? "\n" : "}\n"));
  }
}

void RolloutMetrics::finish() { file_.commit(); }

}  // namespace espalier
