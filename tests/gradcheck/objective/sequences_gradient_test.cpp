// The objective with trajectories and branches, against torch autograd on the loss written plainly: every policy loss,
// aggregation, unit and rule of shared tokens, with importance weights, rejection and KL terms taking turns.
#include <ATen/core/Tensor.h>
#include <ATen/ops/concat.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/log.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "espalier/grouping/shared_tokens.h"
#include "espalier/objective/objective.h"
#include "espalier/objective/rejection.h"
#include "tests/gradcheck/objective/bounds.h"

namespace espalier {
namespace {

using Series = std::vector<std::vector<double>>;

struct Case {
  std::vector<Rollout> batch;
  Series advantages, logprobs, entropies;
};

struct Spec {
  const char* trajectory;
  const char* branch;
  std::vector<std::int32_t> prompt, response;
};

// Trajectory x: a stem that two branches repeat, and a third branch that leaves it earlier. y: two turns without
// branches. z: branches, of which one sees the other's tokens as its prompt. Then single records, one fully masked.
std::vector<Spec> specs() {
  return {{"x", "", {1, 2}, {3, 4, 5}},
          {"x", "b", {1, 2}, {3, 4, 5, 6, 7}},
          {"x", "c", {1, 2}, {3, 4, 5, 8}},
          {"x", "d", {1, 2}, {3, 9, 9, 9, 9, 9}},
          {"y", "", {1, 2}, {3, 4}},
          {"y", "", {1, 2, 3, 4, 5}, {6}},
          {"z", "p", {1}, {7, 7}},
          {"z", "q", {1, 7, 7}, {8, 8}},
          {"", "", {1, 2}, {4, 4, 4, 4}},
          {"", "", {1, 2}, {3, 4, 5}},
          {"", "", {5}, {}}};
}

constexpr std::size_t kMasked = 8;  // of specs()

// Log-probs of a token depend on the tokens before it and the token, as a model's do.
Case make_case(std::uint64_t seed, bool absent_old) {
  Case made;
  std::map<std::vector<std::int32_t>, double> known;
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  for (const Spec& spec : specs()) {
    Rollout rollout;
    rollout.prompt_ids = spec.prompt, rollout.response_ids = spec.response;
    rollout.trajectory = spec.trajectory, rollout.branch = spec.branch;
    rollout.group = "\"g\"";
    std::vector<std::int32_t> seen = spec.prompt;
    made.advantages.emplace_back(), made.logprobs.emplace_back(), made.entropies.emplace_back();
    for (const std::int32_t token : spec.response) {
      seen.push_back(token);
      const double lp = known.try_emplace(seen, -0.3 - 2 * std::abs(normal(random))).first->second;
      rollout.loss_mask.push_back(made.batch.size() != kMasked && random() % 5 != 0);
      rollout.old_logprobs.push_back(lp + 0.3 * normal(random));
      rollout.ref_logprobs.push_back(lp + 0.3 * normal(random));
      rollout.rollout_logprobs.push_back(lp + 0.3 * normal(random));
      made.logprobs.back().push_back(lp);
      made.entropies.back().push_back(std::abs(normal(random)));
      made.advantages.back().push_back(normal(random));
    }
    if (absent_old && made.batch.size() % 4 == 1) rollout.old_logprobs.clear();
    made.batch.push_back(rollout);
  }
  return made;
}

std::vector<std::int32_t> tokens_to(const Rollout& rollout, std::size_t position) {
  std::vector<std::int32_t> out = rollout.prompt_ids;
  out.insert(out.end(), rollout.response_ids.begin(), rollout.response_ids.begin() + static_cast<long>(position) + 1);
  return out;
}

bool begins_with(const Rollout& rollout, const std::vector<std::int32_t>& tokens) {
  if (rollout.length() < std::ssize(tokens)) return false;
  for (std::int32_t d = 0; d < std::ssize(tokens); ++d)
    if (rollout.token_at(d) != tokens[static_cast<std::size_t>(d)]) return false;
  return true;
}

// The share of each token, from the definition, one token at a time.
Series plain_shares(const std::vector<Rollout>& batch, SharedTokens choice) {
  Series out;
  for (std::size_t i = 0; i < batch.size(); ++i) {
    out.emplace_back(batch[i].loss_mask.begin(), batch[i].loss_mask.end());
    std::set<std::string> branches;
    for (const Rollout& other : batch)
      if (other.trajectory == batch[i].trajectory && !other.branch.empty()) branches.insert(other.branch);
    if (batch[i].trajectory.empty() || branches.size() < 2 || choice == SharedTokens::each) continue;
    for (std::size_t t = 0; t < out[i].size(); ++t) {
      if (!batch[i].loss_mask[t]) continue;
      const std::vector<std::int32_t> tokens = tokens_to(batch[i], t);
      double owners = 0;
      bool first = true;
      std::set<std::string> on;
      for (std::size_t j = 0; j < batch.size(); ++j) {
        if (batch[j].trajectory != batch[i].trajectory || !begins_with(batch[j], tokens)) continue;
        on.insert(batch[j].branch);
        const std::int64_t position = std::ssize(tokens) - 1 - batch[j].prompt_length();
        if (position < 0 || !batch[j].loss_mask[static_cast<std::size_t>(position)]) continue;
        owners += 1;
        if (j < i) first = false;
      }
      const double on_branches =
          on.contains("") ? static_cast<double>(branches.size()) : static_cast<double>(on.size());
      out[i][t] = choice == SharedTokens::once ? (first ? 1.0 : 0.0)
                                               : on_branches / static_cast<double>(branches.size()) / owners;
    }
  }
  return out;
}

at::Tensor row(const std::vector<double>& values) { return at::tensor(values, at::kDouble); }

// The tokens of a sequence end to end.
struct Plain {
  at::Tensor lp, old, ref, roll, A, share, H;
};

at::Tensor mean_of(const at::Tensor& values, const at::Tensor& share) {
  return (values * share).sum() / share.sum().clamp_min(1e-300);
}

at::Tensor plain_policy(const Options& o, const Plain& p, const at::Tensor& weight) {
  const double low = 1 - o.clip_ratio_low, high = 1 + o.clip_ratio_high;
  const std::string loss = name_of(o.policy_loss);
  const at::Tensor k = mean_of(p.lp - p.old, p.share);
  at::Tensor r = at::exp(within(p.lp - p.old, -20.0, 20.0));
  if (o.ratio_level == RatioLevel::sequence) r = at::exp(at_most(k, 10.0)).expand_as(p.lp);
  if (loss == "gpg" || loss == "reinforce") return -p.A * p.lp;
  if (loss == "gspo") r = at::exp(at_most(p.lp - p.lp.detach() + k.detach(), 10.0));
  const at::Tensor held = within(r, low, high);
  if (loss == "gspo") return at::maximum(-p.A * r, -p.A * held);
  if (loss == "cispo") return -held.detach() * p.A * p.lp;
  if (loss == "sapo") {
    const at::Tensor tau = at::where(p.A.gt(0), at::full_like(p.A, 1.0), at::full_like(p.A, 1.05));
    return -p.A * at::sigmoid(tau * (r - 1)) * 4 / tau;
  }
  if (loss == "vespo") {
    const at::Tensor corrected = within(p.lp - p.old, -20.0, 20.0) +
                                 (o.rollout_is == RolloutCorrection::token ? at::log(weight) : at::zeros_like(p.lp));
    const at::Tensor log_w = within((corrected * p.share).sum(), std::log(1e-8), 20.0).detach();
    const at::Tensor k_of = at::where(p.A.ge(0), at::full_like(p.A, 2.0), at::full_like(p.A, 3.0));
    const at::Tensor lambda = at::where(p.A.ge(0), at::full_like(p.A, 3.0), at::full_like(p.A, 2.0));
    return -at::exp(lambda + k_of * log_w - lambda * at::exp(log_w)) * p.A * p.lp;
  }
  const at::Tensor now = at::exp(p.lp).detach(), before = at::exp(p.old), gains = p.A.gt(0);
  if (loss == "dppo_tv") {
    const at::Tensor valid =
        at::where(gains, (now - before).le(o.clip_ratio_high), (now - before).ge(-o.clip_ratio_low));
    return -p.A * at_most(r, o.clip_ratio_c).detach() * p.lp * valid.to(at::kDouble);
  }
  if (loss == "dppo_kl") {
    const at::Tensor kl =
        before * (p.old - p.lp.detach()) + (1 - before) * at::log((1 - before + 1e-8) / (1 - now + 1e-8));
    const at::Tensor valid = at::where(gains, kl.le(o.clip_ratio_high).logical_or(now.le(before)),
                                       kl.le(o.clip_ratio_low).logical_or(now.ge(before)));
    return -p.A * at_most(r, o.clip_ratio_c).detach() * p.lp * valid.to(at::kDouble);
  }
  const at::Tensor to_sampler = p.lp - p.roll, moved = now - at::exp(p.roll);
  if (loss == "dppo") {
    const at::Tensor valid = at::where(gains, moved.le(o.dppo_mask_high), moved.ge(-o.dppo_mask_low));
    return -o.adv_tau * p.A * at::exp(to_sampler) * valid.to(at::kDouble) + o.kl_tau * to_sampler * to_sampler;
  }
  if (loss == "icepop") {
    const at::Tensor ratio = at::exp(to_sampler);
    const at::Tensor inside = ratio.ge(o.icepop_ratio_low).logical_and(ratio.le(o.icepop_ratio_high));
    return -o.adv_tau * p.A * ratio * inside.to(at::kDouble);
  }
  const at::Tensor upper = at::maximum(-p.A * r, -p.A * held);
  return at::where(p.A.lt(0), at::minimum(-p.A * o.clip_ratio_c, upper), upper);
}

at::Tensor plain_weight(const Options& o, const Plain& p) {
  const at::Tensor d = (p.old - p.roll).detach();
  const auto bounded = [&](const at::Tensor& log_ratio) {
    return at_most(at::exp(within(log_ratio, -20.0, 20.0)), o.rollout_is_threshold);
  };
  if (o.rollout_is == RolloutCorrection::token) return bounded(d);
  if (o.rollout_is == RolloutCorrection::sequence) return bounded((d * p.share).sum()).expand_as(d);
  if (o.rollout_is == RolloutCorrection::none) return at::ones_like(d);
  const double mean = std::exp(mean_of(d, p.share).item<double>());
  return mean >= o.rollout_is_floor && mean <= o.rollout_is_threshold ? at::exp(d) : at::zeros_like(d);
}

at::Tensor plain_kl(const Options& o, const Plain& p) {
  const at::Tensor x = p.lp - p.ref;
  if (o.kl_loss_type == KlLossType::mse) return x * x / 2;
  const at::Tensor k3 = at::exp(-x) + x - 1;
  if (o.kl_loss_type == KlLossType::k3_unbounded) return k3;
  const at::Tensor k = mean_of(p.lp - p.old, p.share);
  const bool by_sequence = o.ratio_level == RatioLevel::sequence || o.policy_loss == PolicyLoss::gspo;
  return (by_sequence ? at::exp(at_most(k, 10.0)) : at::exp(within(p.lp - p.old, -20.0, 20.0))) * k3;
}

struct Result {
  double loss = 0;
  Series grad_logprob, grad_entropy;
};

Result run_plain(const Case& made, const Options& o) {
  const Series shares = plain_shares(made.batch, o.shared_tokens);
  std::vector<std::vector<std::size_t>> sequences;
  std::map<std::string, std::size_t> known;
  for (std::size_t i = 0; i < made.batch.size(); ++i) {
    const std::string& name = made.batch[i].trajectory;
    if (o.loss_unit == LossUnit::trajectory && !name.empty()) {
      const auto [found, is_new] = known.try_emplace(name, sequences.size());
      if (is_new) sequences.emplace_back();
      sequences[found->second].push_back(i);
    } else {
      sequences.push_back({i});
    }
  }
  std::vector<at::Tensor> lps, entropies;
  double all_tokens = 0, longest = 1;
  for (std::size_t i = 0; i < made.batch.size(); ++i) {
    lps.push_back(row(made.logprobs[i]).requires_grad_(true));
    entropies.push_back(row(made.entropies[i]).requires_grad_(true));
    for (const double share : shares[i]) all_tokens += share;
    longest = std::max<double>(longest, made.batch[i].response_length());
  }
  at::Tensor total = at::zeros({}, at::kDouble);
  const double count = static_cast<double>(sequences.size());
  const std::string mode = name_of(o.loss_agg_mode);
  for (const auto& members : sequences) {
    std::vector<at::Tensor> parts[7];
    for (const std::size_t i : members) {
      const Rollout& rollout = made.batch[i];
      const at::Tensor old = rollout.old_logprobs.empty() ? lps[i].detach() : row(rollout.old_logprobs);
      const at::Tensor each[] = {lps[i],
                                 old,
                                 row(rollout.ref_logprobs),
                                 row(rollout.rollout_logprobs),
                                 row(made.advantages[i]),
                                 row(shares[i]),
                                 entropies[i]};
      for (std::size_t k = 0; k < 7; ++k) parts[k].push_back(each[k]);
    }
    const Plain p{at::concat(parts[0]), at::concat(parts[1]), at::concat(parts[2]), at::concat(parts[3]),
                  at::concat(parts[4]), at::concat(parts[5]), at::concat(parts[6])};
    const at::Tensor weight = plain_weight(o, p);
    const at::Tensor factor = o.policy_loss == PolicyLoss::vespo ? at::ones_like(weight) : weight;
    const at::Tensor token =
        factor * plain_policy(o, p, weight) + o.kl_loss_coef * plain_kl(o, p) - o.entropy_coeff * p.H;
    const double tokens = p.share.sum().item<double>();
    const double scale = mode == "token-sum"                 ? 1
                         : mode == "token-mean"              ? 1 / all_tokens
                         : mode == "seq-mean-token-sum"      ? 1 / count
                         : mode == "seq-mean-token-sum-norm" ? 1 / (count * longest)
                                                             : 1 / (count * (tokens + 1e-8));
    total = total + scale * (token * p.share).sum();
  }
  total.backward();
  Result result{total.item<double>(), {}, {}};
  for (std::size_t i = 0; i < lps.size(); ++i) {
    const at::Tensor g = lps[i].grad(), h = entropies[i].grad();
    result.grad_logprob.emplace_back(g.data_ptr<double>(), g.data_ptr<double>() + g.numel());
    result.grad_entropy.emplace_back(h.data_ptr<double>(), h.data_ptr<double>() + h.numel());
  }
  return result;
}

Result run_objective(Case made, const Options& options) {
  settle_shared_tokens(made.batch, options.shared_tokens);
  Objective objective(made.batch, made.advantages, options);
  if (objective.needs_sequences()) objective.settle_sequences(made.logprobs);
  Result result;
  for (std::size_t i = 0; i < made.batch.size(); ++i) {
    std::vector<double> grad_logprob(made.logprobs[i].size(), 1e300), grad_entropy = grad_logprob;
    const int rollout = static_cast<int>(i);
    if (objective.needs_whole_rollout() || i % 2) {
      objective.add_rollout(rollout, made.logprobs[i], made.entropies[i], grad_logprob, grad_entropy);
    } else {
      for (std::size_t t = grad_logprob.size(); t-- > 0;) {
        const TokenGradient gradient =
            objective.add_token(rollout, static_cast<int>(t), made.logprobs[i][t], made.entropies[i][t]);
        grad_logprob[t] = gradient.logprob, grad_entropy[t] = gradient.entropy;
      }
    }
    result.grad_logprob.push_back(grad_logprob), result.grad_entropy.push_back(grad_entropy);
  }
  result.loss = objective.parts().loss;
  return result;
}

// As in objective_gradient_test.cpp: about ten double operations a token, some dozen tokens, exp of numbers below 20.
double tolerance(double magnitude) { return 1e-13 * (1 + std::abs(magnitude)); }

// The options of one turn; false: they contradict each other.
bool take_turns(std::uint64_t turn, const std::string& loss, Options& options) {
  const bool by_sampler = loss == "dppo" || loss == "icepop";
  const std::vector<std::string> corrections =
      by_sampler        ? std::vector<std::string>{"none"}
      : loss == "vespo" ? std::vector<std::string>{"none", "token"}
                        : std::vector<std::string>{"none", "token", "sequence", "seq-mask-tis"};
  options.rollout_is = corrections[turn % corrections.size()];
  options.rollout_is_floor = options.rollout_is == RolloutCorrection::seq_mask_tis ? 0.9 : 0.0;
  options.rollout_is_threshold = 1.1;
  const char* const kls[] = {"mse", "k3_unbounded", "k3_unbiased"};
  options.kl_loss_type = kls[turn / 4 % (by_sampler ? 2 : 3)];
  options.kl_loss_coef = 0.3, options.entropy_coeff = 0.07, options.clip_ratio_high = 0.28;
  options.dppo_mask_low = 0.02, options.dppo_mask_high = 0.03, options.kl_tau = 0.5, options.adv_tau = 1.5;
  options.icepop_ratio_low = 0.8, options.icepop_ratio_high = 1.25;
  return loss != "sapo" || options.loss_agg_mode == Aggregation::seq_mean_token_mean;
}

TEST(SequencesGradient, AgreesWithAutogradForEveryUnitAndRuleOfSharedTokens) {
  std::uint64_t turn = 0;
  int cases = 0;
  for (const char* loss : words_of(PolicyLoss{}))
    for (const char* level : {"token", "sequence"}) {
      if (std::string(level) == "sequence" && std::string(loss) != "vanilla" && std::string(loss) != "sapo") continue;
      for (const char* mode :
           {"token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"})
        for (const char* unit : {"record", "trajectory"})
          for (const char* shared : words_of(SharedTokens{})) {
            Options options;
            options.policy_loss = loss, options.ratio_level = level, options.loss_agg_mode = mode;
            options.loss_unit = unit, options.shared_tokens = shared;
            if (!take_turns(++turn, loss, options)) continue;
            ++cases;
            const Case made = make_case(1000 + turn, turn % 3 == 0);
            const Result expected = run_plain(made, options), got = run_objective(made, options);
            const std::string label = std::string(loss) + " " + level + " " + mode + " " + unit + " " + shared + " " +
                                      name_of(options.rollout_is) + " " + name_of(options.kl_loss_type);
            EXPECT_NEAR(got.loss, expected.loss, tolerance(expected.loss)) << label;
            for (std::size_t i = 0; i < made.batch.size(); ++i)
              for (std::size_t t = 0; t < made.logprobs[i].size(); ++t) {
                EXPECT_NEAR(got.grad_logprob[i][t], expected.grad_logprob[i][t], tolerance(expected.grad_logprob[i][t]))
                    << label << ", rollout " << i << " token " << t;
                EXPECT_NEAR(got.grad_entropy[i][t], expected.grad_entropy[i][t], 1e-15) << label;
              }
            if (HasFailure()) return;
          }
    }
  EXPECT_GT(cases, 250);
}

}  // namespace
}  // namespace espalier
