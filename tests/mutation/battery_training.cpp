// AdamW, mini-batches and resume against plain loops and against an uninterrupted run.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>

#include "espalier/base/error.h"
#include "espalier/base/random.h"
#include "espalier/data/training_data.h"
#include "espalier/ops/dispatch.h"
#include "espalier/train/trainer.h"
#include "tests/equivalence/fixture.h"
#include "tests/mutation/battery.h"

namespace espalier::testing {
namespace {

namespace fs = std::filesystem;

std::vector<double> values_of(const at::Tensor& x) { return {pointer<double>(x), pointer<double>(x) + x.numel()}; }

// One update as in the AdamW paper, element by element.
struct PlainAdamW {
  std::vector<double> p, m, v;
  int t = 0;

  void step(const std::vector<double>& gradient, const ParameterTable& table, const AdamWSettings& s) {
    double squares = 0;
    for (const double g : gradient) squares += g * g;
    const double clip = std::min(1.0, s.max_grad_norm / (std::sqrt(squares) + 1e-6));
    const double lr = s.lr * std::min(1.0, t / static_cast<double>(s.warmup_steps));
    ++t;
    for (const Parameter& parameter : table.parameters())
      for (std::int64_t i = parameter.offset; i < parameter.offset + parameter.count; ++i) {
        if (parameter.shape.size() >= 2) p[i] -= lr * s.weight_decay * p[i];
        const double g = clip * gradient[i];
        m[i] = s.beta1 * m[i] + (1 - s.beta1) * g;
        v[i] = s.beta2 * v[i] + (1 - s.beta2) * g * g;
        const double mean = m[i] / (1 - std::pow(s.beta1, t)), square = v[i] / (1 - std::pow(s.beta2, t));
        p[i] -= lr * mean / (std::sqrt(square) + s.eps);
      }
  }
};

std::string bytes_of_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path.string() + " is missing");
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

}  // namespace

void check_adamw(Findings& findings) {
  const auto model = tiny_model("llama-bias", DType::float64, 51);
  AdamWSettings settings;
  settings.lr = 1e-2, settings.weight_decay = 0.1, settings.beta2 = 0.95;
  settings.decay_matrices_only = true, settings.warmup_steps = 2;
  const std::vector<double> start = values_of(model->weights), zero(start.size());
  AdamW optimizer(model->table, model->weights, settings);
  PlainAdamW plain{start, zero, zero};
  Random random(52);
  double worst = 0;
  for (int step = 0; step < 4; ++step) {
    at::Tensor gradient = at::empty_like(model->weights);
    for (std::int64_t i = 0; i < gradient.numel(); ++i) pointer<double>(gradient)[i] = random.normal();
    optimizer.step(gradient);
    plain.step(values_of(gradient), model->table, settings);
    for (std::size_t i = 0; i < start.size(); ++i)
      worst = std::max(worst, std::abs(pointer<double>(model->weights)[i] - plain.p[i]));
  }
  // Weights of size 1 and four updates of about twenty rounded operations each: below 1e-14. A fault shows in lr =
  // 1e-2.
  if (!(worst <= 1e-12)) findings.add("adamw", text_of("a weight is off by ", worst));
}

// REINFORCE++ with the group's mean as baseline: what is whitened must be the file.
void check_mini_batches(Findings& findings) {
  RolloutOptions rollout_options;
  rollout_options.groups = 5, rollout_options.group_size = {2, 3}, rollout_options.mask_gap = 0.3;
  Options options = test_options();
  options.adv_estimator = "reinforce_plus_plus_baseline", options.mini_batch_size = 3;
  const std::vector<Rollout> rollouts = make_rollouts(rollout_options, 53);
  std::map<std::string, std::pair<double, double>> groups;  // sum and count of the rewards
  for (const Rollout& r : rollouts) groups[r.group].first += *r.reward, groups[r.group].second += 1;
  const auto centred = [&](const Rollout& r) { return *r.reward - groups[r.group].first / groups[r.group].second; };
  const auto loss_tokens = [](const Rollout& r) {
    double tokens = 0;
    for (const auto m : r.loss_mask) tokens += m;
    return tokens;
  };
  double tokens = 0, mean = 0, variance = 0;
  for (const Rollout& r : rollouts) tokens += loss_tokens(r), mean += loss_tokens(r) * centred(r);
  mean /= tokens;
  for (const Rollout& r : rollouts)
    variance += loss_tokens(r) * (centred(r) - mean) * (centred(r) - mean) / (tokens - 1);

  const TrainingData data(rollouts, options);
  if (data.mini_batches() < 3) findings.add("mini-batches", text_of("only ", data.mini_batches()));
  for (std::int64_t b = 0; b < data.mini_batches(); ++b) {
    const MiniBatch batch = data.mini_batch(b);
    for (std::size_t i = 0; i < batch.rollouts.size(); ++i)
      for (std::size_t t = 0; t < batch.rollouts[i].response_ids.size(); ++t) {
        const double expected =
            batch.rollouts[i].loss_mask[t] ? (centred(batch.rollouts[i]) - mean) / std::sqrt(variance + 1e-8) : 0;
        // Sums of a few hundred terms of size 1 in double.
        if (!(std::abs(batch.advantages[i][t] - expected) <= 1e-12))
          findings.add("mini-batches", text_of("advantage ", batch.advantages[i][t], " instead of ", expected));
      }
  }
}

void check_resume(const std::string& folder, Findings& findings) {
  RolloutOptions rollout_options;
  rollout_options.groups = 3, rollout_options.group_size = {2, 2};
  write_jsonl(folder + "/training.jsonl", make_rollouts(rollout_options, 54));
  const auto run = [&](const std::string& name, std::int64_t steps, const std::string& resume) {
    Options options = test_options();
    options.model = folder + "/model", options.rollouts = folder + "/training.jsonl", options.out = folder + "/" + name;
    options.resume = resume.empty() ? "" : folder + "/" + resume;
    options.dtype = "bfloat16", options.lr = 1e-3, options.mini_batch_size = 2;
    options.epochs = 2, options.steps = steps, options.token_budget = 8;
    fs::remove_all(options.out);
    NoProgress progress;
    train(options, progress, [](const StepReport&, const Json&) {});
    return folder + "/" + name;
  };
  const std::string whole = run("whole", 4, "");
  run("begun", 2, "");
  const std::string continued = run("continued", 4, "begun");
  for (const char* file : {"/espalier/state.safetensors", "/model.safetensors"})
    if (bytes_of_file(whole + file) != bytes_of_file(continued + file))
      findings.add("resume", text_of(file + 1, " differs from that of an uninterrupted run"));
}

}  // namespace espalier::testing
