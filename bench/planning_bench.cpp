// How long prefix trees and the plan of one very large step take: rollouts of random tokens in groups with one prompt.
//
//   planning_bench [rollouts 100000] [tokens of a rollout 4096] [responses to a prompt 8] [rounds 3]
//
// A quarter of a rollout is its prompt; responses are between half and one and a half times the rest, evenly. Prints
// one JSON object: seconds of grouping and of planning (medians), processor seconds of both, and what was planned.
#include <cstdio>
#include <ctime>
#include <string>
#include <vector>

#include "bench/spread.h"
#include "espalier/base/random.h"
#include "espalier/grouping/prefix_tree.h"
#include "espalier/mixers/attention/shape.h"
#include "espalier/plan/planner.h"

namespace {

using namespace espalier;
using bench::median;
using bench::now;

ModelShape shape_of_8b() {
  ModelShape shape;
  shape.architecture = "Qwen3ForCausalLM";
  shape.hidden = 4096;
  shape.vocabulary = 151936, shape.max_positions = 40960;
  AttentionShape attention{.heads = 32, .kv_heads = 8, .head_dim = 128, .qk_norm = true};
  attention.rope.theta = 1e6;
  shape.layer = attention_layers(36, std::move(attention), 12288);
  return shape;
}

std::vector<Rollout> random_rollouts(std::int64_t count, std::int64_t tokens, std::int64_t n, std::int64_t vocabulary) {
  Random random(1);
  std::vector<Rollout> out(static_cast<std::size_t>(count));
  const auto fill = [&](std::vector<std::int32_t>& ids, std::int64_t length) {
    ids.resize(static_cast<std::size_t>(length));
    for (std::int32_t& id : ids) id = static_cast<std::int32_t>(random.integer(0, vocabulary - 1));
  };
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (i % static_cast<std::size_t>(n) == 0)
      fill(out[i].prompt_ids, tokens / 4);
    else
      out[i].prompt_ids = out[i - 1].prompt_ids;
    const std::int64_t rest = tokens - tokens / 4;
    fill(out[i].response_ids, rest / 2 + random.integer(0, rest));
    out[i].loss_mask.assign(out[i].response_ids.size(), 1);
  }
  return out;
}

double processor_seconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

}  // namespace

int main(int argc, char** argv) {
  const auto number = [&](int index, std::int64_t otherwise) {
    return argc > index ? std::stoll(argv[index]) : otherwise;
  };
  const ModelShape shape = shape_of_8b();
  const std::vector<Rollout> batch =
      random_rollouts(number(1, 100000), number(2, 4096), number(3, 8), shape.vocabulary);
  const MachineProfile machine = default_profile("cpu", DType::bfloat16, 2);
  std::vector<double> grouping, planning, processor;
  StepPlan plan;
  for (std::int64_t round = 0; round < number(4, 3); ++round) {
    plan = {};
    const double begin = now(), processor_begin = processor_seconds();
    const std::vector<PrefixTree> trees = build_prefix_trees(batch, ShareMode::whole_trees);
    const double grouped = now();
    plan = make_plan(batch, trees, shape, {}, machine);
    grouping.push_back(grouped - begin);
    planning.push_back(now() - grouped);
    processor.push_back(processor_seconds() - processor_begin);
  }
  std::printf(
      "{\"rollouts\": %zu, \"tokens\": %ld, \"trees\": %zu, \"waves\": %ld, \"grouping_seconds\": %.4f, "
      "\"planning_seconds\": %.4f, \"processor_seconds\": %.4f, \"predicted_step_seconds\": %.1f}\n",
      batch.size(), static_cast<long>(plan.logical_rows), plan.trees.size(), static_cast<long>(plan.waves),
      median(grouping), median(planning), median(processor), plan.chosen.seconds);
}
