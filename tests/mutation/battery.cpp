#include "tests/mutation/battery.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <stdlib.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <mutex>

#include "espalier/base/error.h"
#include "espalier/base/instruction_set.h"
#include "espalier/checkpoint/model_directory.h"
#include "espalier/data/training_data.h"
#include "espalier/device/host_values.h"
#include "espalier/ops/cpu/own_products.h"
#include "espalier/prove/verify.h"
#include "tests/equivalence/fixture.h"
#include "tests/support/in_process.h"
#include "tests/support/layers.h"
#include "tests/with_products.h"

namespace espalier::testing {
namespace {

namespace fs = std::filesystem;

// Tolerances: tests/equivalence/plans_test.cpp.
constexpr double kGradient = 1e-10, kSeries = 1e-11;

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (fs::temp_directory_path() / "espalier-mutation-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary folder");
    path_ = name;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

// A case, its plans, and what autograd says.
struct Reference {
  Case c;
  std::vector<Plan> plans;
  OracleResult expected;
  std::vector<Rollout> rollouts;
  bool over_ranks_of_rows = true;  // --cp and --pp take it
};

RolloutOptions ragged() {
  RolloutOptions options;
  options.groups = 3;
  options.group_size = {3, 4};
  options.prompt_length = {1, 12};
  options.response_length = {1, 9};
  options.shared_start = 0.4, options.equal_response = 0.15, options.empty_response = 0.05;
  options.continues = 0.2, options.mask_gap = 0.3, options.nested_prompt = 0.3, options.late_difference = 0.2;
  options.kept_sets = 0.6;
  options.policy = PolicyAge::near_old;
  return options;
}

Reference token_loss() {
  Reference r;
  r.c.family = "qwen3", r.c.seed = 41;
  r.c.options.kl_loss_coef = 0.1, r.c.options.entropy_coeff = 0.01, r.c.options.rollout_is = "token";
  r.c.rollouts = ragged();
  r.c.rollouts.temperature_low = 0.7, r.c.rollouts.temperature_high = 1.3;
  r.plans = {{"dense", "dense", 0, "auto"},
             {"packed, 7 rows a wave", "packed", 7, "auto"},
             {"phased, keep", "phased", 0, "keep"},
             {"phased, keep, 7 rows a wave", "phased", 7, "keep"},
             {"phased, recompute, 7 rows a wave", "phased", 7, "recompute"},
             {"phased, keep, 2 rows a wave", "phased", 2, "keep"}};
  return r;
}

// Eleven waves: of twelve ranks one has none of its own.
Reference eleven_waves() {
  Reference r;
  r.c.family = "qwen3", r.c.seed = 48;
  r.c.rollouts.groups = 1, r.c.rollouts.group_size = {11, 11};
  r.c.rollouts.prompt_length = {9, 9}, r.c.rollouts.response_length = {6, 6};
  r.plans = {{"phased, keep, 7 rows a wave", "phased", 7, "keep"}};
  return r;
}

Reference sequence_loss() {
  Reference r;
  r.c.family = "llama", r.c.seed = 42;
  r.c.options.policy_loss = "gspo", r.c.options.entropy_coeff = 0.02;
  r.c.rollouts = ragged();
  r.plans = {{"packed", "packed", 0, "auto"},
             {"phased, keep, 5 rows a wave", "phased", 5, "keep"},
             {"phased, recompute", "phased", 0, "recompute"}};
  return r;
}

// A window of five rows over prompts of up to twelve.
Reference windows() {
  Reference r;
  r.c.family = "qwen3-window", r.c.seed = 49;
  r.c.rollouts = ragged();
  r.plans = {{"packed", "packed", 0, "auto"},
             {"phased, keep, 5 rows a wave", "phased", 5, "keep"},
             {"phased, recompute", "phased", 0, "recompute"}};
  return r;
}

// Rows carry a state; prompts of up to twelve rows behind a convolution over four.
Reference states() {
  Reference r = windows();
  r.c.family = "qwen3-next", r.c.seed = 50;
  return r;
}

// A row of the table of families, for the properties that Llama and Qwen do not have.
Reference row_of_table(const char* name) {
  Reference r;
  r.c.family = name, r.c.seed = 50;
  r.c.rollouts = ragged();
  r.plans = {{"phased, keep, 5 rows a wave", "phased", 5, "keep"}};
  return r;
}

// Layers read the keys and values of earlier ones, which --cp and --pp refuse.
Reference later_layers() {
  Reference r = row_of_table("gemma4-reads");
  r.over_ranks_of_rows = false;
  return r;
}

// Experts and their shared expert with norms of their own, which a recomputation computes again.
Reference experts_apart() {
  Reference r = row_of_table("gemma4-moe");
  r.plans.push_back({"phased, recompute", "phased", 0, "recompute"});
  return r;
}

Reference path_of_latents() {
  Reference r = row_of_table("DeepseekV3");
  r.c.options.path_state = "latents";
  return r;
}

// Adapters of every kind of module.
Reference adapters(const char* family, const char* target) {
  Reference r = row_of_table(family);
  r.c.options.lora_rank = 3, r.c.options.lora_alpha = 7, r.c.options.lora_target = target;
  return r;
}

Reference routers(const std::string& family, const std::string& scope) {
  Reference r;
  r.c.family = family, r.c.seed = 45;
  r.c.options.router_aux_loss_coef = 0.5, r.c.options.router_aux_loss_scope = scope;
  r.c.options.router_z_loss_coef = 0.2;
  r.c.rollouts = ragged();
  r.plans = {{"packed", "packed", 0, "auto"}, {"phased, recompute, 7 rows a wave", "phased", 7, "recompute"}};
  return r;
}

// Recorded experts in every rollout, from the third token on other ones in every third.
Reference recorded_routes() {
  Reference r = routers("qwen3-moe", "rollout");
  r.c.seed = 47;
  r.c.edit = [](std::vector<Rollout>& rollouts, const ModelState& model) {
    for (std::size_t i = 0; i < rollouts.size(); ++i) {
      RecordedExperts& routes = rollouts[i].recorded_experts;
      routes.tokens = rollouts[i].length(), routes.layers = 3, routes.chosen = 2;
      for (std::int32_t depth = 0; depth < routes.tokens; ++depth)
        for (std::int32_t layer = 0; layer < 3; ++layer) {
          const std::int64_t first = (depth + layer + (i % 3 == 2 && depth >= 2)) % (model.shape.experts - 1);
          routes.ids.insert(routes.ids.end(),
                            {static_cast<std::uint16_t>(first), static_cast<std::uint16_t>(first + 1)});
        }
    }
  };
  return r;
}

Reference critic() {
  Reference r;
  r.c.family = "qwen3", r.c.seed = 46, r.c.critic = true;
  r.c.rollouts = ragged();
  r.c.rollouts.values = true;
  // Recorded returns are near the values; the reward's returns are beyond the clip too.
  r.c.edit = [](std::vector<Rollout>& rollouts, const ModelState&) {
    for (std::size_t i = 0; i < rollouts.size(); i += 2) rollouts[i].returns.clear();
  };
  r.plans = {{"dense", "dense", 0, "auto"},
             {"packed, 7 rows a wave", "packed", 7, "auto"},
             {"phased, recompute, 7 rows a wave", "phased", 7, "recompute"}};
  return r;
}

Reference with_reference(Reference r) {
  r.expected = run_oracle(r.c);
  const TrainingData data(make_rollouts(r.c.rollouts, r.c.seed), r.c.options);
  const auto batch = data.mini_batch(0).rollouts;
  r.rollouts.assign(batch.begin(), batch.end());
  return r;
}

double farthest(const std::vector<std::vector<double>>& expected, const std::vector<std::vector<double>>& found) {
  double largest = 0;
  for (std::size_t i = 0; i < expected.size(); ++i)
    for (std::size_t t = 0; t < expected[i].size(); ++t) {
      const double difference = std::abs(found.at(i).at(t) - expected[i][t]);
      if (!(difference <= largest)) largest = std::isnan(difference) ? HUGE_VAL : difference;
    }
  return largest;
}

double farthest(const std::vector<std::vector<double>>& expected, const std::vector<RolloutSeries>& series,
                std::vector<double> RolloutSeries::*member) {
  std::vector<std::vector<double>> found;
  for (const RolloutSeries& rollout : series) found.push_back(rollout.*member);
  return farthest(expected, found);
}

void check_plan(const Reference& reference, const Plan& plan, Findings& findings) {
  const Outcome run = run_case(with(reference.c, plan));
  try {
    validate(run.report.plan, reference.rollouts);
  } catch (const InternalError& error) {
    findings.add("plan", text_of(plan.name, ": ", error.what()));
  }
  const OracleResult& expected = reference.expected;
  const double logprob = farthest(expected.logprobs, run.report.series, &RolloutSeries::logprob);
  const double entropy = farthest(expected.entropies, run.report.series, &RolloutSeries::entropy);
  if (!(std::max(logprob, entropy) <= kSeries))
    findings.add("log-probs", text_of(plan.name, ": off by ", logprob, ", entropies by ", entropy));
  const double value = farthest(expected.values, run.critic.values);
  if (!(value <= kSeries)) findings.add("values", text_of(plan.name, ": off by ", value));
  const double loss = std::abs(run.loss - expected.loss);
  if (!(loss <= kGradient * std::max(1.0, std::abs(expected.loss))))
    findings.add("loss", text_of(plan.name, ": off by ", loss));
  const Worst worst = worst_parameter(reference.c, run.gradient, expected.gradient);
  if (!(worst.error <= kGradient))
    findings.add("gradients", text_of(plan.name, ": ", worst.parameter, " off by ", worst.error));
}

// Compares a rank's findings with one process's.
void compare_with_one(const std::string& check, const Reference& reference, const Case& c, const Outcome& run,
                      Findings& findings) {
  const OracleResult& expected = reference.expected;
  const double logprob = farthest(expected.logprobs, run.report.series, &RolloutSeries::logprob);
  const double value = farthest(expected.values, run.critic.values), loss = std::abs(run.loss - expected.loss);
  const Worst worst = worst_parameter(c, run.gradient, expected.gradient);
  if (!(worst.error <= kGradient)) findings.add(check, text_of(worst.parameter, " off by ", worst.error));
  if (!(std::max(logprob, value) <= kSeries)) findings.add(check, text_of("series off by ", logprob, ", ", value));
  if (!(loss <= kGradient * std::max(1.0, std::abs(expected.loss)))) findings.add(check, text_of("loss ", loss));
}

// Two ranks: the numbers of one, and after an update that they share the weights of one.
void check_ranks(const Reference& reference, Findings& findings) {
  const Case c = with(reference.c, reference.plans.back());
  const auto moved = [&](const at::Tensor& gradient, const Mesh& mesh) {
    const auto model = tiny_model(c.family, DType::float64, c.seed, c.critic, mesh, choice_of(c.options));
    AdamW adamw(model->table, model->weights, {.lr = 0.1, .max_grad_norm = 1e-3}, model->decoder.device(),
                {mesh.dp, mesh.world});
    adamw.step(gradient);
    return model->weights;
  };
  const at::Tensor alone = moved(reference.expected.gradient, mesh_of_one());
  std::mutex one;
  run_ranks({.dp = 2}, [&](const Mesh& mesh) {
    const Outcome run = run_case(c, DType::float64, mesh);
    const at::Tensor shared = moved(reference.expected.gradient, mesh);
    const std::lock_guard lock(one);
    compare_with_one("ranks", reference, c, run, findings);
    if (!shared.equal(alone)) findings.add("ranks", "other weights after an update");
  });
}

void check_context(const Reference& reference, const Plan& plan, Findings& findings) {
  const Case c = with(reference.c, plan);
  std::mutex one;
  run_ranks({.cp = 2}, [&](const Mesh& mesh) {
    const Outcome run = run_case(c, DType::float64, mesh);
    const std::lock_guard lock(one);
    compare_with_one("context", reference, c, run, findings);
  });
}

void check_sharded_path(const Reference& reference, const Plan& plan, std::int64_t cp, Findings& findings) {
  Case c = with(reference.c, plan);
  c.options.path_state = "divide";
  std::mutex one;
  const auto body = [&](const Mesh& mesh) {
    const Outcome run = run_case(c, DType::float64, mesh);
    const std::lock_guard lock(one);
    compare_with_one("divided path", reference, c, run, findings);
  };
  run_ranks({.cp = cp}, body, {.timeout = 5});
}

void check_stages(const Reference& reference, Findings& findings) {
  const Case c = with(reference.c, reference.plans.back());
  const ParameterTable whole(shape_of(c), Parameters::trained);
  const at::Tensor gradient = at::zeros({whole.size()}, at::kDouble);
  std::mutex one;
  std::vector<Outcome> runs;
  run_ranks({.pp = 2}, [&](const Mesh& mesh) {
    Outcome run = run_case(c, DType::float64, mesh);
    const ParameterTable own(LocalShape(shape_of(c), mesh.degrees, mesh.place()), Parameters::trained);
    const std::lock_guard lock(one);
    for (const Parameter& p : own.parameters()) {
      parameter_in(gradient, whole.at(p.name)).copy_(parameter_in(run.gradient, p));  // of both, if two have it
    }
    runs.push_back(std::move(run));
  });
  for (Outcome& run : runs) {
    run.gradient = gradient;
    compare_with_one("stages", reference, c, run, findings);
  }
}

// Ranks that have parts of the model: of each part the gradient, of all of them together the norm.
void check_layout(const Reference& reference, const Degrees& degrees, Findings& findings) {
  const Case c = with(reference.c, reference.plans.back());
  const ParameterTable whole(shape_of(c), Parameters::trained);
  const at::Tensor& expected = reference.expected.gradient;
  std::mutex one;
  const auto body = [&](const Mesh& mesh) {
    const Outcome run = run_case(c, DType::float64, mesh);
    const auto model = tiny_model(c.family, DType::float64, c.seed, c.critic, mesh, choice_of(c.options));
    AdamW adamw(model->table, model->weights, {}, model->decoder.device(), {.world = mesh.world});
    const double norm = adamw.step(run.gradient).grad_norm, right = expected.norm().item<double>();
    const std::lock_guard lock(one);
    at::Tensor found = expected.clone();
    for (const Parameter& p : model->table.parameters())
      put_part(parameter_in(found, whole.at(p.name)), p.shard, without_padding(parameter_in(run.gradient, p), p.shard));
    const Worst worst = worst_parameter(c, found, expected);
    const std::string where = text_of_degrees(degrees) + ": ";
    if (!(worst.error <= kGradient)) findings.add("layouts", text_of(where, worst.parameter, " off by ", worst.error));
    if (!(std::abs(norm - right) <= kGradient * right)) findings.add("layouts", text_of(where, "norm ", norm));
  };
  run_ranks(degrees, body, {.timeout = 5});
}

// Gradients before and after an update, of what a rank keeps.
std::array<at::Tensor, 2> gradients_around_an_update(const Case& c, const Mesh& mesh) {
  const auto model = tiny_model(c.family, DType::float64, c.seed, c.critic, mesh);
  const TrainingData data(make_rollouts(c.rollouts, c.seed), c.options);
  model->decoder.reserve_positions(data.longest());
  // An epsilon far above what rounding leaves of a gradient that vanishes.
  AdamW adamw(model->table, model->weights, {.lr = 0.01, .eps = 1e-4}, model->decoder.device(), {.world = mesh.world});
  Actor actor(*model, c.options, default_profile("cpu", DType::float64, 1), &adamw);
  std::array<at::Tensor, 2> out;
  for (at::Tensor& gradient : out) {
    compute_gradient(actor, data.mini_batch(0), true);
    gradient = actor.gradients.flat().clone();
    update_weights(actor);
  }
  return out;
}

// Ranks that divide the weights among them.
void check_units(const Reference& reference, Findings& findings) {
  const Case c = with(reference.c, reference.plans.back());
  const auto alone = gradients_around_an_update(c, mesh_of_one());
  std::mutex one;
  const auto body = [&](const Mesh& mesh) {
    const ParameterTable table(LocalShape(shape_of(c), mesh.degrees, mesh.place()));
    const auto ranks = gradients_around_an_update(c, mesh);
    const std::lock_guard lock(one);
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      const double norm = alone[i].norm().item<double>();
      const double error = (ranks[i] - kept_of(alone[i], table)).norm().item<double>() / norm;
      if (!(error <= kGradient)) findings.add("units", text_of("gradient ", i, " off by ", error));
    }
  };
  run_ranks({.dp = 2, .full = true}, body, {.timeout = 5});
}

void check_repetition(const Reference& reference, Findings& findings) {
  const auto model = tiny_model(reference.c.family, DType::float64, reference.c.seed);
  const TrainingData data(make_rollouts(reference.c.rollouts, reference.c.seed), reference.c.options);
  model->decoder.reserve_positions(data.longest());
  Actor actor(*model, with(reference.c, reference.plans.back()).options, default_profile("cpu", DType::float64, 1));
  compute_gradient(actor, data.mini_batch(0), false);
  const at::Tensor first = actor.gradients.flat().clone();
  compute_gradient(actor, data.mini_batch(0), false);
  if (!actor.gradients.flat().equal(first)) findings.add("repetition", "the second gradient differs from the first");
}

std::int64_t other_bits(const std::vector<double>& a, const std::vector<double>& b) {
  std::int64_t count = 0;
  for (std::size_t t = 0; t < a.size(); ++t)
    count += std::bit_cast<std::uint64_t>(a[t]) != std::bit_cast<std::uint64_t>(b.at(t));
  return count;
}

// Log-probs and entropies in float32, where sums have a defined order.
void check_bits(Findings& findings) {
  const WithProducts own(true);
  Case c;
  c.family = "llama-bias", c.seed = 51;
  c.rollouts = ragged();
  c.rollouts.policy = PolicyAge::none;
  const Outcome dense = run_case(with(c, {"dense", "dense", 0, "auto"}), DType::float32);
  for (const Plan& plan : {Plan{"phased, 1 row a wave", "phased", 1, "keep"}, Plan{"packed", "packed", 0, "auto"}}) {
    at::set_num_threads(2);
    const Outcome run = run_case(with(c, plan), DType::float32);
    at::set_num_threads(1);
    std::int64_t other = 0;
    for (std::size_t i = 0; i < run.report.series.size(); ++i)
      other += other_bits(run.report.series[i].logprob, dense.report.series.at(i).logprob) +
               other_bits(run.report.series[i].entropy, dense.report.series.at(i).entropy);
    if (other > 0) findings.add("bits", text_of(plan.name, ": ", other, " numbers with other bits than dense"));
  }
}

// A product of float32 against its sums written out (ops/cpu/own_products.h).
void check_order_of_sums(Findings& findings) {
  if (instruction_set() == InstructionSet::baseline) return;  // which has no fused multiply-adds
  constexpr std::int64_t kRows = 5, kColumns = 39, kSteps = 600, kBlock = own_products::kSumBlock<float>;
  std::vector<float> a(kRows * kSteps), b(kColumns * kSteps), found(kRows * kColumns);
  std::uint32_t state = 1;  // numbers of 24 bits in [-1, 1)
  for (std::vector<float>* numbers : {&a, &b})
    for (float& x : *numbers) x = static_cast<float>((state = state * 1664525 + 1013904223) >> 8) / 8388608.0F - 1;
  own_products::multiply<float, float>(
      {kRows, kColumns, kSteps, {a.data(), kSteps, true}, {b.data(), kSteps, true}, nullptr, 0, found.data(), kColumns},
      1);
  for (std::int64_t n = 0; n < kRows * kColumns; ++n) {
    const float *row = a.data() + n / kColumns * kSteps, *column = b.data() + n % kColumns * kSteps;
    float sum = 0;
    for (std::int64_t block = 0; block < kSteps; block += kBlock) {
      float chain = 0;
      for (std::int64_t k = block; k < std::min(block + kBlock, kSteps); ++k)
        chain = std::fma(row[k], column[k], chain);
      sum = block == 0 ? chain : sum + chain;
    }
    if (sum != found[static_cast<std::size_t>(n)])
      findings.add("order of sums",
                   text_of("row ", n / kColumns, ", column ", n % kColumns, " is not the defined sum"));
  }
}

void add_failure(const Verdict& verdict, Findings& findings) {
  if (verdict.pass()) return;
  findings.add("verify", text_of(verdict.worst().name, " is ", verdict.worst().distance.error,
                                 " from dense, log-probs ", verdict.logprob.error, ", loss ", verdict.loss.error));
}

void check_verify(const fs::path& folder, const std::string& policy_loss, Findings& findings) {
  Options options = test_options();
  options.model = folder / "model", options.rollouts = folder / "rollouts.jsonl";
  options.dtype = "float64", options.policy_loss = policy_loss;
  if (policy_loss != "gspo") options.critic = folder / "model";
  if (policy_loss == "gspo") options.schedule = "phased", options.token_budget = 7;
  NoProgress progress;
  add_failure(verify(options, progress), findings);
}

// In float32, where nearly tied routers choose as in float64; with losses of the routers, and in waves
// so small that trunks stand below trunks.
void check_verify_experts(const fs::path& folder, Findings& findings) {
  Options options = test_options();
  options.model = folder / "experts", options.rollouts = folder / "more_rollouts.jsonl";
  options.dtype = "float32", options.schedule = "phased", options.trunk_state = "recompute", options.token_budget = 4;
  options.router_aux_loss_coef = 0.5, options.router_z_loss_coef = 0.2;
  NoProgress progress;
  const Verdict verdict = verify(options, progress);
  if (verdict.router->differing == 0) findings.add("verify", "no choice of the routers is made by rounding");
  add_failure(verdict, findings);
}

void write_model(const fs::path& folder, const std::string& family) {
  fs::create_directories(folder);
  const auto model = tiny_model(family, DType::float32, 43);
  const ModelShape& s = model->shape;
  const AttentionShape& attention = attention_of(s);
  const std::string experts =
      s.experts == 0 ? ""
                     : text_of("\"num_experts\": ", s.experts, ", \"num_experts_per_tok\": ", s.experts_per_token,
                               ", \"moe_intermediate_size\": ", s.expert_inner, ", \"norm_topk_prob\": true, ");
  std::ofstream(folder / "config.json") << text_of(
      "{\"architectures\": [\"", s.architecture, "\"], \"model_type\": \"", s.experts == 0 ? "qwen3" : "qwen3_moe",
      "\", ", experts, "\"hidden_size\": ", s.hidden, ", \"num_hidden_layers\": ", s.layers(),
      ", \"num_attention_heads\": ", attention.heads, ", \"num_key_value_heads\": ", attention.kv_heads,
      ", \"head_dim\": ", attention.head_dim, ", \"intermediate_size\": ", s.at(0).inner,
      ", \"vocab_size\": ", s.vocabulary, ", \"max_position_embeddings\": ", s.max_positions,
      ", \"rms_norm_eps\": 1e-6, \"rope_theta\": 10000.0, \"tie_word_embeddings\": ", s.tied_head ? "true" : "false",
      "}");
  write_named_tensors(folder / "model.safetensors", model->table, DType::float32, host_bytes(on_host(model->weights)));
}

RolloutOptions rollouts_of_verify(std::int64_t groups) {
  RolloutOptions options = ragged();
  options.groups = groups;
  options.policy = PolicyAge::none;  // ratios of 1: no token is cut off by clipping
  return options;
}

}  // namespace

void Findings::add(const std::string& check, const std::string& what) {
  if (!by(check)) all_.push_back({check, what});
}

bool Findings::by(const std::string& check) const {
  for (const Finding& finding : all_)
    if (finding.check == check) return true;
  return false;
}

struct Battery::Prepared {
  TemporaryFolder folder;
  std::vector<Reference> references;
  Reference eleven_waves, adapted_router;
};

Battery::Battery() : prepared_(std::make_unique<Prepared>()) {
  at::set_num_threads(1);  // the cases are small
  // The machine's profile is neither measured nor kept: plans must be the same everywhere.
  ::setenv("XDG_CACHE_HOME", "/dev/null", 1);
  prepared_->references.push_back(with_reference(token_loss()));
  prepared_->references.push_back(with_reference(sequence_loss()));
  prepared_->references.push_back(with_reference(critic()));
  prepared_->references.push_back(with_reference(routers("qwen3-moe", "rollout")));
  prepared_->references.push_back(with_reference(routers("qwen3-moe-ties", "minibatch")));
  prepared_->references.push_back(with_reference(recorded_routes()));
  prepared_->references.push_back(with_reference(windows()));
  for (const char* name : {"Gemma2", "Granite", "Gemma3", "SmolLM3", "Glm4", "Glm4Moe", "Qwen2Moe", "GptOss",
                           "qwen3-window-sinks", "DeepseekV2", "DeepseekV3"})
    prepared_->references.push_back(with_reference(row_of_table(name)));
  prepared_->references.push_back(with_reference(later_layers()));
  prepared_->references.push_back(with_reference(path_of_latents()));
  prepared_->references.push_back(with_reference(experts_apart()));
  prepared_->references.push_back(with_reference(states()));
  prepared_->adapted_router = with_reference(adapters("Qwen2Moe", "all-linear,experts,gate,lm_head"));
  prepared_->references.push_back(prepared_->adapted_router);
  prepared_->references.push_back(with_reference(adapters("DeepseekV3", "kv_a_proj_with_mqa,kv_b_proj")));
  prepared_->references.push_back(with_reference(adapters("Phi3", "qkv_proj,gate_up_proj")));
  prepared_->eleven_waves = with_reference(eleven_waves());
  const fs::path& folder = prepared_->folder.path();
  write_model(folder / "model", "qwen3");
  write_jsonl(folder / "rollouts.jsonl", make_rollouts(rollouts_of_verify(2), 44));
  write_model(folder / "experts", "qwen3-moe-near-ties");
  write_jsonl(folder / "more_rollouts.jsonl", make_rollouts(rollouts_of_verify(8), 44));
}

Battery::~Battery() = default;

Findings Battery::run(const std::function<void()>& begin_check,
                      const std::function<bool(const Findings&)>& enough) const {
  Findings findings;
  const auto check = [&](const std::string& name, const std::function<void()>& work) {
    if (enough(findings)) return;
    begin_check();
    try {
      work();
    } catch (const std::exception& error) {
      findings.add(name, error.what());
    }
  };
  const fs::path& folder = prepared_->folder.path();
  for (const char* loss : {"vanilla", "gspo"}) check("verify", [&] { check_verify(folder, loss, findings); });
  check("verify", [&] { check_verify_experts(folder, findings); });
  for (const Reference& reference : prepared_->references)
    for (const Plan& plan : reference.plans) check("refused", [&] { check_plan(reference, plan, findings); });
  for (const Reference& reference : prepared_->references) check("ranks", [&] { check_ranks(reference, findings); });
  for (const Reference& reference : prepared_->references) {
    if (!reference.over_ranks_of_rows) continue;
    for (const Plan& plan : reference.plans) check("context", [&] { check_context(reference, plan, findings); });
  }
  const Reference& ragged = prepared_->references.front();
  for (const std::int64_t cp : {2, 3})
    check("divided path", [&] { check_sharded_path(ragged, ragged.plans.at(3), cp, findings); });
  const Reference& eleven = prepared_->eleven_waves;
  check("divided path", [&] { check_sharded_path(eleven, eleven.plans.front(), 12, findings); });
  for (const Reference& reference : prepared_->references)
    if (reference.over_ranks_of_rows) check("stages", [&] { check_stages(reference, findings); });
  const auto& references = prepared_->references;
  check("layouts", [&] { check_layout(references.front(), {.tp = 4}, findings); });
  for (const Degrees& degrees : {Degrees{.tp = 2, .ep = 2}, {.dp = 2, .ep = 2}, {.dp = 4, .ep = 2}})
    check("layouts", [&] { check_layout(references.at(3), degrees, findings); });
  check("layouts", [&] { check_layout(prepared_->adapted_router, {.tp = 2}, findings); });
  check("units", [&] { check_units(references.front(), findings); });
  check("repetition", [&] { check_repetition(prepared_->references.front(), findings); });
  check("bits", [&] { check_bits(findings); });
  check("order of sums", [&] { check_order_of_sums(findings); });
  check("adamw", [&] { check_adamw(findings); });
  check("mini-batches", [&] { check_mini_batches(findings); });
  check("resume", [&] { check_resume(folder.string(), findings); });
  return findings;
}

}  // namespace espalier::testing
