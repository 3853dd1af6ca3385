// Tiny models of every family with random weights, and one gradient of a batch under given options.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "espalier/step/critic.h"
#include "espalier/step/step.h"
#include "tests/support/make_rollouts.h"
#include "tests/support/oracle.h"

namespace espalier::testing {

// "llama" (rope scaling, untied), "llama-bias" (all biases, tied), "qwen2" (q, k, v biases, untied), "qwen3" (QK-norm,
// tied, head size that is not width / heads), "qwen3-moe" (QK-norm, untied, 8 experts, 2 a token, in every layer) and
// its variants "-plain" (weights not renormalised), "-sparse" (experts in every second layer), "-late" (a dense first
// layer), "-one" (one of 2), "-all" (all of 4), "-many" (4 of 16), "-ties" (all router logits 0: everybody chooses
// experts 0 and 1, nobody the others), "-near-ties" (the routers' rows differ by 1e-6 of themselves: rounding to
// float32 decides many choices),
// "-128" (8 of 128, narrow). "qwen3-next" (QK-norm, an output gate, rows of the first two layers carry a state; one
// matrix by key head) and its variants "-plain" (matrices of all heads), "-last" (states in the first and the last
// layer), "-all" (in every layer), "-moe" (8 experts in every layer). Behind any of them "-window": rows of the first
// and the last layer see 5 rows, "-windows": rows of all layers do; "-pad": the model has a padding token; "-odd":
// inner widths that 2 and 4 do not divide; "-after", "-both": norms behind the halves of blocks.
inline constexpr std::int32_t kPadToken = 3;
ModelShape tiny_shape(const std::string& family, std::int64_t vocabulary = 50);

// Random weights with norms and biases away from 1 and 0, so that a gradient that forgets one of them is wrong.
// Each rank of the mesh has its own part.
// `train`: what trains. Adapters have random A and B.
std::unique_ptr<ModelState> tiny_model(const std::string& family, DType dtype, std::uint64_t seed, bool critic = false,
                                       const Mesh& mesh = mesh_of_one(), const TrainedChoice& train = {});

// A parameter in a flat buffer of its table; the part of a whole one that a shard is, read and written; a local one
// without padding.
at::Tensor parameter_in(const at::Tensor& flat, const Parameter& parameter);
at::Tensor part_of(const at::Tensor& whole, const Shard& shard);
void put_part(const at::Tensor& whole, const Shard& shard, const at::Tensor& part);
at::Tensor without_padding(const at::Tensor& local, const Shard& shard);
// The part of a flat tensor in the table's layout that a rank keeps (--shard full), padding 0.
at::Tensor kept_of(const at::Tensor& flat, const ParameterTable& table);

// Writes a model of a Qwen3 family, with or without experts, as a float32 directory that load_model reads.
void write_tiny_model(const ModelState& model, const std::filesystem::path& directory);

// Required of every gradient in float64 (relative L2, each parameter).
inline constexpr double kFloat64 = 1e-10;

// Rollouts of every kind that the generator knows, far from the policy that sampled them.
RolloutOptions ragged_rollouts();

// Options with the machine profile and arena of a test.
Options test_options();

struct Case {
  std::string family = "qwen3";
  Options options = test_options();
  RolloutOptions rollouts;
  std::uint64_t seed = 1;
  bool critic = false;  // the gradient is that of a critic with the family's blocks; needs rollouts with values
  std::function<void(std::vector<Rollout>&, const ModelState&)> edit = {};  // of the generated rollouts; may be empty
};

// The rows of the table of families, config/model_families.h, each a name that `family` takes.
std::vector<std::string> families_of_table();

// A case of this family, on ragged rollouts.
Case ragged(const std::string& family);
// As a part of a test's name.
std::string name_of_family(std::string family);

// The parameters that the options of a case train.
TrainedChoice choice_of(const Options& options);
ModelShape shape_of(const Case& c);  // with what c.options train

// The trained part of a flat tensor that has all parameters.
at::Tensor trained_part(const Case& c, const at::Tensor& of_all);

struct Outcome {
  GradientReport report;  // of a critic: the pass alone
  CriticReport critic;
  at::Tensor gradient;  // flat, float64; of the parameters that train and that the rank has
  double loss = 0;
};

// A copy on the host of a tensor on the run's device.
inline at::Tensor on_host(const at::Tensor& tensor) { return bound_device().to_host(tensor); }

// One gradient; the model is made anew from the case's seed. Called by every rank of the mesh.
Outcome run_case(const Case& c, DType dtype = DType::float64, const Mesh& mesh = mesh_of_one());
// All weights of a model on the host, those that are held and adapters' products included.
struct Merged {
  ParameterTable table;
  at::Tensor weights;
};
Merged merged(const ModelState& model);
// Gradients of adapters follow by the chain rule from the gradient of W + s B A,  dA = s B^T dW,  dB = s dW A^T.
OracleResult run_oracle(const Case& c, DType dtype = DType::float64);

// The arena bytes that the plan predicts for the passes of the case in each phase, without bytes beside the arena.
PhasePeaks predicted_arena_bytes(const Case& c, const StepPlan& plan, DType dtype);

// Required where sums have a defined order: log-probs and entropies of all rollouts are the same bits.
void expect_same_bits(const Outcome& run, const Outcome& expected);

// |a - b| / |b| of the whole vector, and the worst over the table's parameters with its name.
struct Worst {
  std::string parameter;
  double error = 0;
};
Worst worst_parameter(const Case& c, const at::Tensor& gradient, const at::Tensor& reference);

// Every combination of schedule, wave budget, trunk and wave state, by name and as options.
struct Plan {
  std::string name;
  std::string schedule;
  std::int64_t budget;
  std::string trunk_state;
  std::string wave_state = "auto";
};
std::vector<Plan> all_plans(const std::vector<std::int64_t>& budgets);
Case with(Case c, const Plan& plan);

}  // namespace espalier::testing
