// Derivatives of the objective: against torch autograd on the loss written plainly with tensors (every policy loss,
// KL type, aggregation and rollout correction, kinks included), and against central differences of the loss itself.
#include <ATen/core/Tensor.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "espalier/objective/objective.h"
#include "tests/gradcheck/objective/bounds.h"

namespace espalier {
namespace {

using Series = std::vector<std::vector<double>>;

struct Case {
  std::vector<Rollout> batch;
  Series advantages, logprobs, entropies;
};

struct Result {
  double loss = 0, pg_loss = 0, kl_loss = 0, entropy = 0, clip_fraction = 0;
  Series grad_logprob, grad_entropy;
};

// Ragged rollouts, masks with gaps, one fully masked, one empty; near and far off-policy, and tokens at the kinks:
// ratio exactly 1, log-ratios exactly at and just beyond the bounds of 20, advantage 0, lp equal to ref, and ref
// 20 away from lp. One rollout in `absent_old` has no old log-probs.
Case make_case(std::uint64_t seed, bool kinks, bool absent_old, bool constant_advantages) {
  std::mt19937_64 random(seed), of_teacher(seed + 1);  // apart, so that the rest is the same without a teacher
  std::normal_distribution<double> normal, teachers;
  const auto pick = [&](std::vector<double> offsets) { return offsets[random() % offsets.size()]; };
  Case made;
  const int lengths[] = {5, 1, 0, 7, 3, 4};
  for (int i = 0; i < 6; ++i) {
    Rollout rollout;
    rollout.prompt_ids = {1};
    const double shared_advantage = normal(random);
    made.advantages.emplace_back(), made.logprobs.emplace_back(), made.entropies.emplace_back();
    for (int t = 0; t < lengths[i]; ++t) {
      const double lp = -1.0 - static_cast<double>(random() % 64) / 16;  // so that lp - old can hit the bounds exactly
      const double spread = t % 2 ? 0.2 : 2.5;
      rollout.response_ids.push_back(t);
      rollout.loss_mask.push_back(i == 4 ? 0 : random() % 4 != 0);
      rollout.old_logprobs.push_back(lp -
                                     (kinks ? pick({0, 20, -20, 20.5, -20.5, 0.1, 1, -1}) : spread * normal(random)));
      rollout.ref_logprobs.push_back(lp - (kinks ? pick({0, 20, -20, 25, 1, -1, -2.5}) : spread * normal(random)));
      rollout.rollout_logprobs.push_back(lp + 0.5 * normal(random));
      rollout.teacher_logprobs.push_back(lp + teachers(of_teacher));
      made.logprobs.back().push_back(lp);
      made.entropies.back().push_back(std::abs(normal(random)));
      const bool zero = kinks && random() % 3 == 0;
      made.advantages.back().push_back(constant_advantages ? shared_advantage : zero ? 0.0 : normal(random));
    }
    if (absent_old && i % 3 == 0) rollout.old_logprobs.clear();
    made.batch.push_back(rollout);
  }
  return made;
}

at::Tensor row(const std::vector<double>& values) { return at::tensor(values, at::kDouble); }

// The plain version. One rollout's token losses, before mask and aggregation.
at::Tensor plain_policy_loss(const Options& o, const at::Tensor& lp, const at::Tensor& old, const at::Tensor& A,
                             const at::Tensor& mask, at::Tensor* clipped) {
  const double low = 1 - o.clip_ratio_low, high = 1 + o.clip_ratio_high;
  *clipped = at::zeros_like(mask);
  if (o.policy_loss == "gpg" || o.policy_loss == "reinforce") return -A * lp;
  if (o.policy_loss == "gspo") {
    const at::Tensor mean = ((lp - old) * mask).sum() / mask.sum().clamp_min(1);
    const at::Tensor s = at::exp(at_most(lp - lp.detach() + mean.detach(), 10.0));
    const at::Tensor loss1 = -A * s, loss2 = -A * within(s, low, high);
    *clipped = loss2.gt(loss1).to(at::kDouble);
    return at::maximum(loss1, loss2);
  }
  const at::Tensor r = at::exp(within(lp - old, -20.0, 20.0));
  const at::Tensor held = within(r, low, high);
  if (o.policy_loss == "cispo") {
    *clipped = held.ne(r).to(at::kDouble);
    return -held.detach() * A * lp;
  }
  if (o.policy_loss == "sapo") {
    const at::Tensor tau = at::where(A.gt(0), at::full_like(A, 1.0), at::full_like(A, 1.05));
    return -A * at::sigmoid(tau * (r - 1)) * 4 / tau;
  }
  const at::Tensor loss1 = -A * r, loss2 = -A * held, upper = at::maximum(loss1, loss2);
  *clipped = loss2.gt(loss1).to(at::kDouble);
  return at::where(A.lt(0), at::minimum(-A * o.clip_ratio_c, upper), upper);
}

at::Tensor plain_kl(const std::string& name, const at::Tensor& lp, const at::Tensor& ref) {
  const std::string base = name.back() == '+' ? name.substr(0, name.size() - 1) : name;
  const at::Tensor x = lp - ref;
  at::Tensor value;
  if (base == "kl" || base == "k1") value = x;
  if (base == "abs") value = at::abs(x);
  if (base == "mse" || base == "k2") value = x * x / 2;
  if (base == "low_var_kl" || base == "k3") {
    const at::Tensor y = within(-x, -20.0, 20.0);
    value = within(at::exp(y) - y - 1, -10.0, 10.0);
  }
  if (name.back() != '+') return value;
  const at::Tensor k2 = x * x / 2;
  return k2 - k2.detach() + value.detach();
}

double plain_weight(const Options& o, const std::vector<Rollout>& batch, const Rollout& rollout) {
  double tokens = 0, own = 0, longest = 1;
  for (const Rollout& each : batch) {
    for (int m : each.loss_mask) tokens += m;
    longest = std::max(longest, static_cast<double>(each.response_ids.size()));
  }
  for (int m : rollout.loss_mask) own += m;
  const double rollouts = static_cast<double>(batch.size());
  if (o.loss_agg_mode == "token-mean") return 1 / tokens;
  if (o.loss_agg_mode == "token-sum") return 1;
  if (o.loss_agg_mode == "seq-mean-token-sum") return 1 / rollouts;
  if (o.loss_agg_mode == "seq-mean-token-sum-norm") return 1 / (rollouts * longest);
  return 1 / (rollouts * (own + 1e-8));
}

Result run_plain(const Case& made, const Options& o) {
  Result result;
  at::Tensor pg = at::zeros({}, at::kDouble), kl = at::zeros({}, at::kDouble), entropy = at::zeros({}, at::kDouble);
  std::vector<at::Tensor> lps, entropies;
  double tokens = 0, clipped_tokens = 0;
  for (std::size_t i = 0; i < made.batch.size(); ++i) {
    const Rollout& rollout = made.batch[i];
    at::Tensor lp = row(made.logprobs[i]).requires_grad_(true), H = row(made.entropies[i]).requires_grad_(true);
    lps.push_back(lp), entropies.push_back(H);
    const at::Tensor mask = row(std::vector<double>(rollout.loss_mask.begin(), rollout.loss_mask.end()));
    const at::Tensor old = rollout.old_logprobs.empty() ? lp.detach() : row(rollout.old_logprobs);
    const at::Tensor mismatch = old - row(rollout.rollout_logprobs);
    at::Tensor clipped;
    at::Tensor advantage = row(made.advantages[i]);
    if (o.opd_kl_coef != 0)
      advantage = advantage - o.opd_kl_coef * at_most(old - row(rollout.teacher_logprobs), o.opd_kl_clip);
    at::Tensor loss = plain_policy_loss(o, lp, old, advantage, mask, &clipped);
    const at::Tensor level = o.rollout_is == "token" ? mismatch : (mismatch * mask).sum();
    if (o.rollout_is != "none") loss = loss * at_most(at::exp(within(level, -20.0, 20.0)), o.rollout_is_threshold);
    const double weight = plain_weight(o, made.batch, rollout);
    pg = pg + weight * (loss * mask).sum();
    kl = kl + weight * (plain_kl(name_of(o.kl_loss_type), lp, row(rollout.ref_logprobs)) * mask).sum();
    entropy = entropy + weight * (H * mask).sum();
    tokens += mask.sum().item<double>();
    clipped_tokens += (clipped * mask).sum().item<double>();
  }
  const at::Tensor loss = pg - o.entropy_coeff * entropy + o.kl_loss_coef * kl;
  loss.backward();
  result.loss = loss.item<double>(), result.pg_loss = pg.item<double>();
  result.kl_loss = kl.item<double>(), result.entropy = entropy.item<double>();
  result.clip_fraction = clipped_tokens / tokens;
  for (std::size_t i = 0; i < lps.size(); ++i) {
    const at::Tensor g = lps[i].grad(), h = entropies[i].grad();
    result.grad_logprob.emplace_back(g.data_ptr<double>(), g.data_ptr<double>() + g.numel());
    result.grad_entropy.emplace_back(h.data_ptr<double>(), h.data_ptr<double>() + h.numel());
  }
  return result;
}

Result run_objective(const Case& made, const Options& options) {
  Objective objective(made.batch, made.advantages, options);
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
  const LossParts parts = objective.parts();
  result.loss = parts.loss, result.pg_loss = parts.pg_loss, result.kl_loss = parts.kl_loss;
  result.entropy = parts.entropy, result.clip_fraction = parts.clip_fraction;
  return result;
}

// A chain of about ten double operations per token and some dozen tokens; exp of numbers up to 20 carries the rounding
// of its argument, 20 * 2^-53 relative.
double tolerance(double magnitude) { return 1e-13 * (1 + std::abs(magnitude)); }

const char* const kLosses[] = {"vanilla", "gspo", "cispo", "sapo", "gpg", "reinforce"};
const char* const kKlTypes[] = {"kl",  "k1",  "abs",  "mse",  "k2",  "low_var_kl",  "k3",
                                "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"};
const char* const kModes[] = {"token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm",
                              "token-sum"};

void expect_same(const Case& made, const Options& options, const std::string& label) {
  const Result expected = run_plain(made, options), got = run_objective(made, options);
  EXPECT_NEAR(got.pg_loss, expected.pg_loss, tolerance(expected.pg_loss)) << label;
  EXPECT_NEAR(got.kl_loss, expected.kl_loss, tolerance(expected.kl_loss)) << label;
  EXPECT_NEAR(got.entropy, expected.entropy, tolerance(expected.entropy)) << label;
  EXPECT_NEAR(got.loss, expected.loss, tolerance(expected.pg_loss)) << label;
  EXPECT_NEAR(got.clip_fraction, expected.clip_fraction, 1e-15) << label;
  for (std::size_t i = 0; i < made.batch.size(); ++i)
    for (std::size_t t = 0; t < made.logprobs[i].size(); ++t) {
      EXPECT_NEAR(got.grad_logprob[i][t], expected.grad_logprob[i][t], tolerance(expected.grad_logprob[i][t]))
          << label << ", rollout " << i << " token " << t;
      EXPECT_NEAR(got.grad_entropy[i][t], expected.grad_entropy[i][t], 1e-15)
          << label << ", rollout " << i << " token " << t;
    }
}

TEST(ObjectiveGradient, AgreesWithAutogradForEveryCombination) {
  std::uint64_t seed = 100;
  for (const char* loss : kLosses)
    for (const char* kl : kKlTypes)
      for (const char* mode : kModes) {
        if (std::string(loss) == "sapo" && std::string(mode) != "seq-mean-token-mean") continue;
        Options options;
        options.policy_loss = loss, options.kl_loss_type = kl, options.loss_agg_mode = mode;
        options.kl_loss_coef = 0.3, options.entropy_coeff = 0.07;
        options.clip_ratio_high = 0.28;
        options.rollout_is = (const char*[]){"none", "token", "sequence"}[++seed % 3];
        options.rollout_is_threshold = 1.5;
        const bool kinks = seed % 2, absent_old = seed / 2 % 2;
        const std::string label = std::string(loss) + " " + kl + " " + mode + " " + name_of(options.rollout_is);
        expect_same(make_case(seed, kinks, absent_old, false), options, label + ", seed " + std::to_string(seed));
        if (HasFailure()) return;
      }
}

TEST(ObjectiveGradient, AgreesWithAutogradWhereBoundsMeetTheRatio) {
  // A clip range of no width and a dual clip of 1: at ratio 1 every clamp, maximum and minimum ties.
  for (const char* loss : kLosses)
    for (double width : {0.0, 0.2})
      for (std::uint64_t seed = 1; seed <= 10; ++seed) {
        Options options;
        options.policy_loss = loss, options.loss_agg_mode = "seq-mean-token-mean";
        options.clip_ratio_low = options.clip_ratio_high = width;
        options.clip_ratio_c = 1.0;
        options.kl_loss_coef = 1.0;
        expect_same(make_case(seed, true, seed % 2, false), options,
                    std::string(loss) + ", seed " + std::to_string(seed));
      }
}

TEST(ObjectiveGradient, AgreesWithAutogradUnderATeacher) {
  for (const char* loss : kLosses)
    for (const double clip : {std::numeric_limits<double>::infinity(), 0.5})
      for (std::uint64_t seed = 1; seed <= 8; ++seed) {
        Options options;
        options.policy_loss = loss, options.loss_agg_mode = "seq-mean-token-mean";
        options.opd_kl_coef = 0.7, options.opd_kl_clip = clip;
        options.rollout_is = seed % 3 ? "none" : "token", options.kl_loss_coef = 0.3;
        expect_same(make_case(seed, seed % 2, seed / 2 % 2, false), options,
                    std::string(loss) + ", seed " + std::to_string(seed));
      }
}

TEST(ObjectiveGradient, AgreesWithCentralDifferencesAwayFromKinks) {
  // Losses whose value is a function of the log-probs alone; gspo's detached mean gives the true derivative where the
  // advantage is one number per rollout. Error of the difference: h^2 f''' / 6 + 2^-53 |f| / h, with the step at 1e-5
  // below 1e-7 relative for derivatives up to the size of the loss.
  const double step = 1e-5;
  int checked = 0, kinked = 0;
  for (const char* loss : {"vanilla", "gspo", "sapo", "gpg", "reinforce"})
    for (const char* kl : {"kl", "abs", "mse", "low_var_kl"})
      for (const char* mode : kModes) {
        if (std::string(loss) == "sapo" && std::string(mode) != "seq-mean-token-mean") continue;
        Options options;
        options.policy_loss = loss, options.kl_loss_type = kl, options.loss_agg_mode = mode;
        options.kl_loss_coef = 0.3, options.entropy_coeff = -0.07;
        Case made = make_case(9 + checked, false, false, true);
        const Result here = run_objective(made, options);
        for (std::size_t i = 0; i < made.batch.size(); ++i)
          for (std::size_t t = 0; t < made.logprobs[i].size(); ++t) {
            const auto loss_at = [&](Series& series, double offset) {
              const double before = series[i][t];
              series[i][t] = before + offset;
              const double value = run_objective(made, options).loss;
              series[i][t] = before;
              return value;
            };
            const double above = loss_at(made.logprobs, step), below = loss_at(made.logprobs, -step);
            const double left = (here.loss - below) / step, right = (above - here.loss) / step;
            const double scale = 1 + std::abs(here.loss) + std::abs(here.grad_logprob[i][t]);
            if (std::abs(left - right) > 0.01 * scale) {
              ++kinked;  // a clip lies within the step
              continue;
            }
            EXPECT_NEAR(here.grad_logprob[i][t], (above - below) / (2 * step), 1e-7 * scale)
                << loss << " " << kl << " " << mode << ", rollout " << i << " token " << t;
            EXPECT_NEAR(here.grad_entropy[i][t],
                        (loss_at(made.entropies, step) - loss_at(made.entropies, -step)) / (2 * step), 1e-7 * scale);
            ++checked;
          }
      }
  EXPECT_GT(checked, 1500);
  EXPECT_LT(kinked, 10);
}

}  // namespace
}  // namespace espalier
