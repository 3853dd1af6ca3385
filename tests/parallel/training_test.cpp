// Whole runs on several ranks, through files: what rank 0 writes is what one process writes.
#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>

#include "espalier/base/atomic_file.h"
#include "espalier/base/error.h"
#include "espalier/checkpoint/json_file.h"
#include "espalier/checkpoint/safetensors.h"
#include "espalier/prove/verify.h"
#include "espalier/replay/replay.h"
#include "espalier/score/score.h"
#include "espalier/train/trainer.h"
#include "tests/equivalence/fixture.h"
#include "tests/parallel/rank_runs.h"
#include "tests/support/in_process.h"

namespace espalier::testing {
namespace {

// Tied embeddings, a vocabulary and an inner width that tp does not divide, two key/value heads, three steps or more,
// each of which clips.
TEST_F(RankRuns, FilesAreThoseOfOneProcess) {
  fs::remove_all(folder_ / "model");
  write_tiny_model(*tiny_model("qwen3-odd", DType::float32, 3), folder_ / "model");
  expect_files_of_one_process({{.dp = 5},
                               {.tp = 4},
                               {.tp = 2, .dp = 3},
                               {.cp = 3},
                               {.pp = 3},
                               {.cp = 2, .pp = 2},
                               {.tp = 2, .cp = 2},
                               {.tp = 2, .pp = 2, .dp = 2}});
}

TEST_F(RankRuns, FilesOfShardedWeightsToo) {
  expect_files_of_one_process({{.dp = 2, .full = true},
                               {.dp = 5, .full = true},
                               {.tp = 4, .dp = 2, .full = true},
                               {.cp = 2, .dp = 2, .full = true},
                               {.pp = 2, .dp = 2, .full = true}});
}

TEST_F(RankRuns, FilesOfAModelWithExpertsToo) {
  take_experts();
  expect_files_of_one_process({{.tp = 2},
                               {.tp = 2, .ep = 2},
                               {.dp = 2, .ep = 2},
                               {.tp = 2, .dp = 2, .ep = 4},
                               {.cp = 2, .ep = 2},
                               {.pp = 2, .dp = 2, .ep = 2}});
  expect_files_of_one_process({{.dp = 4, .ep = 2, .full = true}, {.tp = 2, .dp = 2, .ep = 4, .full = true}});
}

// Held parameters: files have what trains, and what does not as the source has it.
TEST_F(RankRuns, FilesOfHeldParametersToo) {
  for (const char* words : {"norms", "embeddings,model[.]layers[.]2[.].*"}) {
    SCOPED_TRACE(words);
    options_.train = words;
    expect_files_of_one_process(
        {{.dp = 3}, {.tp = 2, .pp = 2}, {.cp = 2, .pp = 3}, {.dp = 3, .full = true}, {.pp = 2, .dp = 2, .full = true}});
    options_.shard = "optimizer";
    expect_files_of_one_process({{.dp = 3}});
    options_.shard = "none";
  }
}

// In bfloat16 the masters are others than the weights.
TEST_F(RankRuns, ShardedWeightsInBfloat16GoOnBitForBit) {
  options_.dtype = "bfloat16", options_.epochs = 2;
  const Degrees parts{.dp = 3, .full = true};
  Options whole = options_, first = options_, second = options_;
  whole.out = path("whole"), first.out = path("first"), second.out = path("second");
  const StepReport sharded = run(whole, parts).front(), held = run(first, {.dp = 3}).front();
  // Float32 sums of up to 1,000 rounded terms in another order: 1,000 times 2^-24.
  EXPECT_NEAR(sharded.update.grad_norm, held.update.grad_norm, 6e-5 * held.update.grad_norm);
  first.steps = 2;
  run(first, parts);
  second.resume = first.out;
  run(second, parts);
  for (const char* file : {"/model.safetensors", "/espalier/state.safetensors"})
    EXPECT_EQ(read_text_file(path("second") + file), read_text_file(path("whole") + file)) << file;
}

TEST_F(RankRuns, SharedOptimizerStateMovesTheSameWeights) {
  for (const char* dtype : {"float64", "bfloat16"}) {
    options_.dtype = dtype, options_.save_dtype = "float64", options_.epochs = 2;
    Options whole = options_, parts = options_, first = options_, second = options_;
    whole.out = path("whole"), parts.out = path("parts"), first.out = path("first"), second.out = path("second");
    run(whole, {.dp = 3});
    parts.shard = first.shard = "optimizer";
    run(parts, {.dp = 3});
    first.steps = 2;
    run(first, {.dp = 3});
    second.resume = first.out;  // every rank has the whole state again
    run(second, {.dp = 3});
    for (const char* file : {"/model.safetensors", "/espalier/state.safetensors"}) {
      EXPECT_EQ(read_text_file(path("parts") + file), read_text_file(path("whole") + file)) << dtype << file;
      EXPECT_EQ(read_text_file(path("second") + file), read_text_file(path("whole") + file)) << dtype << file;
    }
  }
}

TEST_F(RankRuns, PartsOfAModelShareTheirStateToo) {
  options_.epochs = 2;
  Options whole = options_, parts = options_;
  whole.out = path("whole"), parts.out = path("parts"), parts.shard = "optimizer";
  run(whole, {.tp = 2, .dp = 2});
  run(parts, {.tp = 2, .dp = 2});
  for (const char* file : {"/model.safetensors", "/espalier/state.safetensors"})
    EXPECT_EQ(read_text_file(path("parts") + file), read_text_file(path("whole") + file)) << file;
}

TEST_F(RankRuns, ARunGoesOnUnderAnotherLayout) {
  options_.epochs = 2;
  Options whole = options_, first = options_, second = options_;
  whole.out = path("whole"), first.out = path("first"), second.out = path("second");
  run(whole, {});
  first.steps = 2;
  for (const auto& [before, after] : {std::pair{Degrees{.dp = 3}, Degrees{.dp = 2}},
                                      {{.dp = 2}, {.tp = 4}},
                                      {{.dp = 3, .full = true}, {}},
                                      {{.tp = 2}, {.tp = 2, .dp = 2, .full = true}},
                                      {{.dp = 4, .full = true}, {.dp = 2, .full = true}},
                                      {{.tp = 2}, {.tp = 4}},
                                      {{.cp = 2}, {.pp = 3}},
                                      {{.cp = 2, .pp = 2}, {.tp = 2}},
                                      {{.tp = 2, .dp = 2}, {}}}) {
    run(first, before);
    second.resume = first.out;
    run(second, after);
    EXPECT_LE(distance("second/model.safetensors", "whole/model.safetensors"), 1e-12)
        << text_of_degrees(before) << ", then " << text_of_degrees(after);
  }
}

TEST_F(RankRuns, TheSameLayoutGivesTheSameBits) {
  take_experts();
  options_.epochs = 2;
  for (const Degrees& degrees : {Degrees{.dp = 3},
                                 {.tp = 4},
                                 {.tp = 2, .dp = 2, .ep = 4},
                                 {.cp = 2, .pp = 2, .ep = 2},
                                 {.dp = 3, .full = true}}) {
    Options whole = options_, first = options_, second = options_;
    whole.out = path("whole"), first.out = path("first"), second.out = path("second");
    run(whole, degrees);
    first.steps = 2;
    run(first, degrees);
    second.resume = first.out;
    run(second, degrees);
    for (const char* file : {"/model.safetensors", "/espalier/state.safetensors"})
      EXPECT_EQ(read_text_file(path("second") + file), read_text_file(path("whole") + file))
          << text_of_degrees(degrees) << file;
  }
}

TEST_F(RankRuns, ATraceOfPartsIsReplayedByOthers) {
  options_.record = path("trace"), options_.record_every = 1;
  const std::size_t steps = run(options_, {.tp = 2}).size();
  for (const Degrees& degrees : {Degrees{}, {.tp = 4}, {.dp = 2}, {.dp = 2, .full = true}})
    run_ranks(degrees, [&](const Mesh& mesh) {
      NoProgress progress;
      const ReplayReport report = replay(
          path("trace"), test_options(), progress, [](const CheckpointDifference&) {}, mesh);
      ASSERT_EQ(report.checkpoints.size(), steps);
      // The order of additions differs: 1e-10 of a movement.
      for (const CheckpointDifference& one : report.checkpoints) EXPECT_LE(one.movement_rel_l2, kFloat64);
    });
}

TEST_F(RankRuns, ACriticTrainsAsAlone) {
  options_.critic = options_.model, options_.adv_estimator = "gae";
  const auto with_outputs = [&](const std::string& name) {
    Options out = options_;
    out.out = path(name), out.gradients = path(name + ".safetensors");
    return out;
  };
  run(with_outputs("alone"), {});
  for (const Degrees& degrees : {Degrees{.dp = 2}, {.tp = 2}, {.dp = 2, .full = true}}) {
    run(with_outputs("ranks"), degrees);
    for (const char* file :
         {"/model.safetensors", "/critic/model.safetensors", "/critic/espalier/values.safetensors", ".safetensors"})
      EXPECT_LE(distance(std::string("ranks") + file, std::string("alone") + file), kFloat64) << file;
  }
}

TEST_F(RankRuns, ScoresAreThoseOfOneProcess) {
  const auto scored = [&](const std::string& name, const Degrees& degrees) {
    Options options = options_;
    options.out = path(name), options.entropies = true;
    ScoreReport report;
    run_ranks(degrees, [&](const Mesh& mesh) {
      NoProgress progress;
      const ScoreReport own = score(options, progress, mesh);
      if (mesh.writes()) report = own;
    });
    return report;
  };
  const ScoreReport alone = scored("alone.jsonl", {});
  for (const Degrees& degrees : {Degrees{.dp = 4}, {.tp = 2}, {.dp = 4, .full = true}}) {
    const ScoreReport ranks = scored("ranks.jsonl", degrees);
    EXPECT_EQ(ranks.tokens, alone.tokens);
    EXPECT_EQ(ranks.logical_rows, alone.logical_rows);
    std::ifstream ours(path("ranks.jsonl")), theirs(path("alone.jsonl"));
    for (std::string a, b; std::getline(theirs, b);) {
      ASSERT_TRUE(std::getline(ours, a));
      const Json one = Json::parse(a), other = Json::parse(b);
      EXPECT_EQ(one["response_ids"], other["response_ids"]);
      for (const char* field : {"logprobs", "entropies"})
        for (std::size_t t = 0; t < other[field].size(); ++t)
          EXPECT_NEAR(one[field][t].get<double>(), other[field][t].get<double>(), 1e-10);
    }
  }
}

TEST_F(RankRuns, VerifyPassesOnSeveralRanks) {
  options_.mini_batch_size = 0, options_.schedule = "phased";
  const auto verdict = [&](const Degrees& degrees) {
    Verdict of_rank_0;
    run_ranks(degrees, [&](const Mesh& mesh) {
      NoProgress progress;
      const Verdict own = verify(options_, progress, mesh);
      EXPECT_TRUE(own.pass()) << text_of_degrees(degrees) << ", " << name_of(options_.dtype);
      if (mesh.writes()) of_rank_0 = own;
    });
    return of_rank_0;
  };
  for (const char* dtype : {"float64", "float32"}) {
    options_.dtype = dtype;
    const Verdict alone = verdict({});
    for (const Degrees& degrees : {Degrees{.dp = 2}, {.tp = 2}, {.tp = 2, .dp = 2}, {.dp = 3, .full = true}})
      EXPECT_EQ(verdict(degrees).parameters.size(), alone.parameters.size()) << "whole parameters";
  }
  take_experts();
  for (const Degrees& degrees : {Degrees{.dp = 2}, {.dp = 2, .ep = 2}, {.tp = 2, .ep = 2}})
    EXPECT_TRUE(verdict(degrees).router.has_value()) << text_of_degrees(degrees);
}

// NaN on one rank is NaN in the sum: all refuse, and nothing is written.
TEST_F(RankRuns, ANanOnOneRankStopsAllAndLeavesNothing) {
  std::vector<Rollout> rollouts = make_rollouts({.groups = 2, .group_size = {2, 2}}, 3);
  for (Rollout& rollout : rollouts) rollout.advantages.assign(rollout.response_ids.size(), -1);
  rollouts.front().old_logprobs.assign(rollouts.front().response_ids.size(), -1e6);  // a ratio beyond all numbers
  write_jsonl(path("rollouts.jsonl"), rollouts);
  options_.log_ratio_bound = options_.clip_ratio_c = std::numeric_limits<double>::infinity();
  options_.out = path("out");
  EXPECT_THROW(run(options_, {.dp = 2}), InputError);
  EXPECT_THROW(run(options_, {.tp = 2}), InputError);
  EXPECT_THROW(run(options_, {.dp = 2, .full = true}), InputError);
  EXPECT_FALSE(fs::exists(path("out")));
}

TEST_F(RankRuns, RanksWithOtherFilesAreTold) {
  fs::copy(path("rollouts.jsonl"), path("other.jsonl"));
  std::string text = read_text_file(path("other.jsonl"));
  const std::size_t digit = text.find("\"reward\":");
  ASSERT_NE(digit, std::string::npos);
  text.insert(digit + 9, "1");
  std::ofstream(path("other.jsonl")) << text;
  options_.out = path("out");
  const auto body = [&](const Mesh& mesh) {
    Options own = options_;
    if (mesh.world.rank() == 1) own.rollouts = path("other.jsonl");
    NoProgress progress;
    train(
        own, progress, [](const StepReport&, const Json&) {}, mesh);
  };
  EXPECT_THROW(run_ranks({.dp = 2}, body), CommunicationError);
  EXPECT_FALSE(fs::exists(path("out")));
}

TEST_F(RankRuns, WhatRankZeroCannotWriteEndsAll) {
  options_.out = path("out"), options_.gradients = path("missing/folder/g.safetensors");
  EXPECT_THROW(run(options_, {.dp = 3}), WriteError);
  EXPECT_FALSE(fs::exists(path("out")));
}

}  // namespace
}  // namespace espalier::testing
