// Bytes of phases and seconds of items: hand-made sums, and how they must change.
#include <gtest/gtest.h>

#include <utility>

#include "espalier/base/error.h"
#include "espalier/base/instruction_set.h"
#include "espalier/base/json.h"
#include "espalier/forecast/cost_model.h"
#include "espalier/forecast/memory_model.h"
#include "espalier/mixers/attention/library_work.h"
#include "espalier/plan/draft.h"
#include "espalier/shape/path_leaves.h"
#include "tests/support/layers.h"
#include "tests/unit/plan/shapes.h"
#include "tests/with_products.h"

namespace espalier {
namespace {

using testing::group_of;
using testing::planned;

TEST(MemoryModel, KeysAndValuesOfAPrefixTokenAreThePublishedBytes) {
  EXPECT_EQ(kv_bytes_per_token(testing::llama_3_8b(), DType::bfloat16), 128 * 1024);
  EXPECT_EQ(kv_bytes_per_token(testing::qwen3_30b_a3b(), DType::bfloat16), 96 * 1024);
  // Accumulators in float32 are twice that (mathematics, section 10); rows are a multiple of the rounding here.
  EXPECT_EQ(ActivationBytes(testing::llama_3_8b(), DType::bfloat16).path({64, 0}).backward, 64 * 3 * 128 * 1024);
}

// Two of 32 layers stay and one is in use: in a forward keys and values of it, a third of all.
TEST(MemoryModel, APathThatSleepsHoldsTheLayersInUse) {
  const ActivationBytes bytes(testing::llama_3_8b(), DType::bfloat16);
  const std::int64_t of_layer = 64 * 3 * 4 * 1024;
  const PathBytes path = bytes.path({64, 0}, {2});
  EXPECT_EQ(path.forward, 2 * of_layer + of_layer / 3);
  EXPECT_EQ(path.backward, 3 * of_layer);
  EXPECT_EQ(path.stored, 30 * of_layer);
  EXPECT_EQ(bytes.path({64, 0}, {32}).stored, 0);
  EXPECT_EQ(bytes.path({0, 0}, {0}).backward, 0);
  // A trunk of 16 rows under 48: keys and values come and go; then all come, and the gradients of those above go.
  const PathTraffic traffic = bytes.path_traffic(48, 16, {2});
  EXPECT_EQ(traffic.forward, 30 * of_layer / 3);
  EXPECT_EQ(traffic.backward, 30 * of_layer + 30 * (of_layer * 2 / 3) * 48 / 64);
  EXPECT_EQ(bytes.path_traffic(48, 16, {}).backward, 0);
  // The traffic that is kept from the last question answers no other one.
  for (const auto& [above, own] : {std::pair{48, 16}, {48, 32}, {32, 32}})
    EXPECT_EQ(bytes.path_traffic(above, own, {2}).backward,
              ActivationBytes(testing::llama_3_8b(), DType::bfloat16).path_traffic(above, own, {2}).backward);
  // Traffic that does not hide behind the compute is paid for.
  const CostModel model(testing::llama_3_8b(), testing::test_profile(), DType::bfloat16);
  const Work work{16, 16 * 64, 0, 0};
  EXPECT_GT(model.seconds(work, SavedState::keep, traffic), model.seconds(work, SavedState::keep));
}

TEST(MemoryModel, HoldsWeightsGradientsMomentsAndMasters) {
  const ModelShape shape = testing::tiny_shape();
  const std::int64_t n = shape.parameters();
  const auto per_parameter = [&](DType dtype, const HeldState& held) {
    ModelShape none = shape;  // the process itself, from a model without parameters
    none.vocabulary = none.hidden = 0;
    none.layer.clear();
    return (ActivationBytes(shape, dtype, {}, {held, {}}).constant() -
            ActivationBytes(none, dtype, {}, {held, {}}).constant()) /
           n;
  };
  EXPECT_EQ(per_parameter(DType::float32, {}), 4 + 4 + 8);
  EXPECT_EQ(per_parameter(DType::float64, {}), 8 + 8 + 16);
  EXPECT_EQ(per_parameter(DType::bfloat16, {}), 2 + 4 + 4 + 8);
  EXPECT_EQ(per_parameter(DType::bfloat16, {.optimizer = false}), 2 + 4);
  EXPECT_EQ(per_parameter(DType::float32, kWeightsOnly), 4);
}

// A thread's packed weights up to 7 MiB (float64: up to 5 MiB and 10 KiB a row, 15 MiB at most), and 12 numbers
// an element of a query of attention up to 3 MiB, under a path 4.25 MiB. The numbers of the rows come to it: 96 bytes
// each, 24 of a trunk's, and 14 KiB for the sums of the head.
TEST(MemoryModel, BuffersBesideTheArenaAreBounded) {
  const WithProducts library(false);
  const ModelShape tiny = testing::tiny_shape();
  const AttentionShape& heads = testing::attention_of(tiny);
  const std::int64_t widest = std::max({tiny.vocabulary, 2 * tiny.at(0).inner, heads.query_width()});
  const std::int64_t row = 12 * 4 * heads.query_width(), ten = 10 * (row + 96) + (14 << 10),
                     twenty = 20 * (row + 96) + (14 << 10), many = (std::int64_t{96} << 20) + (14 << 10);
  EXPECT_EQ(ActivationBytes(tiny, DType::float32).scratch(10), ten) << "products of a few rows pack nothing";
  EXPECT_EQ(ActivationBytes(tiny, DType::float32).scratch(20), tiny.hidden * widest * 4 + twenty);
  EXPECT_EQ(ActivationBytes(tiny, DType::float64).scratch(20), tiny.hidden * widest * 8 + twenty + 20 * row);
  EXPECT_EQ(ActivationBytes(tiny, DType::float64).scratch(20, 5),
            tiny.hidden * widest * 8 + twenty + 20 * row + 5 * 24);
  EXPECT_EQ(
      ActivationBytes(tiny, DType::float64).scratch(20, 5, 3) - ActivationBytes(tiny, DType::float64).scratch(20, 5),
      2 * 20 * 2 * row);
  const ModelShape large = testing::llama_3_8b();
  EXPECT_EQ(ActivationBytes(large, DType::float64).scratch(1 << 20), many + ((15 + 3) << 20));
  EXPECT_EQ(ActivationBytes(large, DType::float64).scratch(512), (10 << 20) + (3 << 20) + 512 * 96 + (14 << 10));
  EXPECT_EQ(ActivationBytes(large, DType::float32).scratch(1 << 20, 0, 8), many + 8 * ((7 + 3) << 20));
  // Kernels for pieces of 256 rows where the matrix library multiplies bfloat16; three panels of 4 MiB, packed, where
  // such products are widened.
  const bool widened = bfloat16_products() == Bfloat16Products::converted;
  EXPECT_EQ(ActivationBytes(large, DType::bfloat16).scratch(1 << 20), many + (((widened ? 12 + 7 : 19) + 3) << 20));
  // Small pieces have kernels of their own; the head and the last rows are multiplied in float32.
  const std::int64_t sixty_four = 64 * 96 + (14 << 10);
  EXPECT_EQ(ActivationBytes(large, DType::bfloat16).scratch(64, 1, 2),
            sixty_four + 24 + (((widened ? 12 : 8) + 2 * 7) << 20) + 2 * (17 << 18));
}

// A GPU holds its context in place of the process, and no tensor for a rounded gradient of a weight.
TEST(MemoryModel, OfAGpuHoldsItsContext) {
  const ModelShape shape = testing::llama_3_8b();
  const ActivationBytes cpu(shape, DType::bfloat16), gpu(shape, DType::bfloat16, {}, {{}, {.cuda = true}});
  EXPECT_EQ(gpu.constant() - gpu.model(), std::int64_t{1} << 30);
  EXPECT_EQ(gpu.model(), cpu.model());
  EXPECT_EQ(gpu.scratch(1000), 1000 * 32 * 128 * 4 + 1000 * 96 + (14 << 10));
  const Work work = work_of_depths(0, 256, true);
  EXPECT_LE(gpu.backward_peak(work, SavedState::keep, true), cpu.backward_peak(work, SavedState::keep, true));
}

// Attention by a library takes memory of ATen's allocator, where the library runs a layer in bfloat16.
TEST(MemoryModel, OfAGpuHoldsTheMemoryOfAttentionLibraries) {
  ModelShape shape = testing::llama_3_8b();
  const auto beside_own = [&](AttentionKernels kernels, bool deterministic, DType dtype = DType::bfloat16,
                              const StepKind& kind = {}) {
    const auto scratch = [&](AttentionKernels of) {
      const DeviceTraits device{.cuda = true, .attention = of, .deterministic = deterministic};
      return ActivationBytes(shape, dtype, kind, {{}, device}).scratch(4096, 8192);
    };
    return scratch(kernels) - scratch(AttentionKernels::own);
  };
  constexpr std::int64_t T = 4096, P = 8192, kHeads = 32, D = 128, J = 8, q = T * kHeads * D, lse = T * kHeads * 4;
  EXPECT_EQ(beside_own(AttentionKernels::cudnn, true, DType::bfloat16, kForwardOnly),
            2 * 2 * q + 4 * q + 2 * lse + kAllocatorBytes);
  // dL/dq, lse, copies of the keys and values of a last block, the gradients of a call and, by FlashAttention-2, dL/dq
  // of 148 / 32 splits, a sum for each query, and gradients of keys and values for each head of queries.
  EXPECT_EQ(beside_own(AttentionKernels::flash, true), 4 * q + lse + 2 * 2 * T * J * D + 2 * q + 2 * 2 * P * J * D +
                                                           5 * 4 * q + lse + 2 * 2 * P * kHeads * D + kAllocatorBytes);
  EXPECT_LT(beside_own(AttentionKernels::flash, false), beside_own(AttentionKernels::flash, true));
  EXPECT_GT(beside_own(AttentionKernels::cudnn, true),
            beside_own(AttentionKernels::cudnn, true, DType::bfloat16, kForwardOnly));
  EXPECT_EQ(beside_own(AttentionKernels::flash, true, DType::float32), 0);
  testing::change_attention(shape, [](AttentionShape& a, std::size_t) { a.soft_cap = 50; });
  EXPECT_EQ(beside_own(AttentionKernels::cudnn, true), 0) << "own kernels run every layer";
}

// The kernels for Hopper sum gradients of queries in tiles of 64 rows, with three numbers a row and head and a counter
// a tile and head beside them.
TEST(MemoryModel, OfHopperHoldsWholeTilesOfSums) {
  const ModelShape shape = testing::llama_3_8b();
  const auto scratch = [&](AttentionKernels of, std::int64_t rows, DType dtype = DType::bfloat16) {
    const DeviceTraits device{.cuda = true, .attention = of};
    return ActivationBytes(shape, dtype, {}, {{}, device}).scratch(rows);
  };
  constexpr std::int64_t kHeads = 32, D = 128;
  for (const auto& [rows, padded] : {std::pair<std::int64_t, std::int64_t>{4096, 4096}, {4097, 4160}, {1, 64}}) {
    const std::int64_t numbers = 2 * padded * kHeads + rows * kHeads + padded / 64 * kHeads;
    EXPECT_EQ(scratch(AttentionKernels::hopper, rows) - scratch(AttentionKernels::own, rows),
              4 * ((padded - rows) * kHeads * D + numbers));
    EXPECT_EQ(scratch(AttentionKernels::hopper_split, rows), scratch(AttentionKernels::own, rows));
    EXPECT_EQ(scratch(AttentionKernels::hopper, rows, DType::float32),
              scratch(AttentionKernels::own, rows, DType::float32));
  }
}

// The context of a GPU that is open is not in the memory that it has left.
TEST(MemoryModel, OfAnOpenedGpuHoldsNoContext) {
  const ActivationBytes opened(testing::llama_3_8b(), DType::bfloat16, {}, {{}, {.cuda = true, .opened = true}});
  EXPECT_EQ(opened.constant() - opened.model(), 128 << 20);
}

TEST(MemoryModel, OwnProductsTakeTheSameRoomOfEveryThread) {
  const WithProducts own(true);
  for (const DType dtype : {DType::float32, DType::float64, DType::bfloat16}) {
    const ActivationBytes bytes(testing::llama_3_8b(), dtype);
    EXPECT_EQ(bytes.scratch(0, 0, 2) - bytes.scratch(0, 0, 1), kOwnProductBytes) << name_of(dtype);
  }
}

TEST(MemoryModel, HoldsTheCodeOfBfloat16Products) {
  const WithProducts library(false);
  const auto beside_the_model = [](DType dtype) {
    const ActivationBytes bytes(testing::tiny_shape(), dtype);
    return bytes.constant() - bytes.model();
  };
  EXPECT_EQ(beside_the_model(DType::float32), 128 << 20);
  EXPECT_EQ(beside_the_model(DType::float64), 128 << 20);
  const bool compiled = bfloat16_products() != Bfloat16Products::converted;
  EXPECT_EQ(beside_the_model(DType::bfloat16), (128 + (compiled ? 10 : 0)) << 20);
}

TEST(MemoryModel, SavedBytesAreThoseOfMathematics10) {
  // T = O = 64 rows of a tiny float32 model: every tensor is a multiple of 64 bytes.
  const ModelShape s = testing::tiny_shape();
  const ActivationBytes bytes(s, DType::float32);
  const std::int64_t T = 64, M = 64, HD = 64, JD = 32, F = 96, H = 4;
  const std::int64_t layer = T * 4 * (2 * M + 2 * HD + 2 * JD + 2 * F + H + 2), outputs = T * 4 * (3 * M + 1);
  const Work all{T, 0, T, 0}, none{T, 0, 0, 0};
  EXPECT_EQ(bytes.saved(all, SavedState::keep), 3 * layer + outputs);
  EXPECT_EQ(bytes.saved(none, SavedState::recompute), 3 * T * M * 4);
  EXPECT_EQ(ActivationBytes(s, DType::float32, {.gradients = false}).saved(all, SavedState::keep), T * 4 * (2 * M + 1));
}

TEST(MemoryModel, WalkFollowsTheStack) {
  const ActivationBytes bytes(testing::tiny_shape(), DType::float32);
  const Work trunk = work_of_depths(0, 640, false), small = work_of_depths(640, 704, true);
  PeakWalk keep(bytes), drop(bytes), alone(bytes);
  for (auto [walk, kept] : {std::pair(&keep, SavedState::keep), std::pair(&drop, SavedState::recompute)}) {
    std::vector<Draft> items(1);
    items[0].kind = ItemKind::trunk, items[0].work = trunk, items[0].state = kept;
    items[0].below.resize(1), items[0].below[0].work = small;
    walk->run(program_of(items, 1));
  }
  std::vector<Draft> wave(1);
  wave[0].work = small;
  alone.run(program_of(wave, 1));
  EXPECT_EQ(keep.peaks(0).b - alone.peaks(0).b, bytes.saved(trunk, SavedState::keep));
  EXPECT_EQ(drop.peaks(0).b - alone.peaks(0).b, bytes.saved(trunk, SavedState::recompute));
  EXPECT_LT(drop.peaks(0).a, keep.peaks(0).a);
  EXPECT_EQ(alone.peaks(1000).a, 0);
  EXPECT_EQ(alone.peaks(1000).b - alone.peaks(0).b, 1000);
}

TEST(MemoryModel, ForwardOnlyHoldsOneLayerAtATime) {
  const Work wave = work_of_depths(0, 256, true);
  ModelShape deep = testing::tiny_shape();
  deep.layer = equal_layers(30, deep.at(0));
  const StepKind score = kForwardOnly;
  const ActivationBytes shallow(testing::tiny_shape(), DType::float32, score), bytes(deep, DType::float32, score);
  EXPECT_EQ(shallow.forward_peak(wave, SavedState::keep, true), bytes.forward_peak(wave, SavedState::keep, true));
}

TEST(CostModel, SmallSetsRunAtALowerRate) {
  const MachineProfile profile = testing::test_profile();
  const CostModel model(testing::llama_3_8b(), profile, DType::float32);
  double before = 1e300;
  for (std::int64_t rows : {1, 8, 64, 512, 4096}) {
    const double per_row = model.seconds(work_of_depths(0, rows, false), SavedState::keep) / static_cast<double>(rows);
    EXPECT_LT(per_row, before * 1.05) << rows;  // attention per row grows with the depth
    before = per_row;
  }
  EXPECT_LT(profile.matrix_flops_per_second(8), 0.5 * profile.matrix_flops_per_second(2048));
  EXPECT_DOUBLE_EQ(profile.matrix_flops_per_second(1 << 20), profile.matrix.back().flops_per_second);
}

TEST(CostModel, MoreRowsNeverTakeLess) {
  for (const ModelShape& shape : {testing::tiny_shape(), testing::qwen3_30b_a3b()})
    for (const char* device : {"cpu", "cuda"}) {
      const CostModel model(shape, default_profile(device, DType::float32, 2), DType::float32);
      double before = 0;
      for (std::int64_t rows = 1; rows < 6000; ++rows) {
        const double seconds = model.seconds(work_of_depths(0, rows, true), SavedState::keep);
        ASSERT_GE(seconds, before) << device << " " << rows;
        before = seconds;
      }
    }
}

// Nothing costs but matrix products: 1,024 rows at 8 of 128 experts give each expert 64 of them.
TEST(CostModel, ExpertProductsRunAtTheRateOfOneExpertsRows) {
  const ModelShape shape = testing::qwen3_30b_a3b();
  MachineProfile profile = testing::test_profile();
  profile.matrix = {{1, 1e9}, {64, 3e10}, {256, 6e10}, {1024, 9e10}};
  profile.attention_flops_per_second = profile.bytes_per_second = 1e40;
  profile.seconds_per_call = 1e-40;
  const StepKind forward{.gradients = false};
  const Work work{1024, 0, 0, 0};
  const Flops flops = forward_flops(shape, work);
  EXPECT_GT(flops.experts, flops.layers);
  EXPECT_NEAR(CostModel(shape, profile, DType::float32, forward).seconds(work, SavedState::keep),
              flops.layers / 9e10 + flops.experts / 3e10, 1e-9 * flops.experts / 3e10);
}

// The same width without experts reaches the machine's rate with a quarter of the rows.
TEST(CostModel, WavesOfExpertModelsAreLarger) {
  ModelShape experts = testing::qwen3_30b_a3b(), dense = experts;
  testing::set_inner(dense, experts.experts_per_token * experts.expert_inner);  // the same FLOPs a row
  dense.experts = dense.experts_per_token = dense.expert_inner = 0;
  testing::set_experts(dense, std::vector<int>(48, 0));
  const std::vector<Rollout> batch = group_of(2000, 1000, 64);
  const auto rows_of = [&](const ModelShape& shape) {
    const MachineProfile profile = default_profile("cuda", DType::bfloat16, 1);
    PlanOptions options;
    options.dtype = DType::bfloat16;
    return make_plan(batch, build_prefix_trees(batch, ShareMode::whole_trees), shape, options, profile).max_rows;
  };
  EXPECT_GE(rows_of(experts), 2 * rows_of(dense));
}

TEST(CostModel, RecomputeCostsAForwardMore) {
  const CostModel model(testing::tiny_shape(), testing::test_profile(), DType::float32);
  const Work work = work_of_depths(0, 500, false);
  EXPECT_GT(model.seconds(work, SavedState::recompute), 1.2 * model.seconds(work, SavedState::keep));
  EXPECT_LT(model.seconds(work, SavedState::recompute), 1.5 * model.seconds(work, SavedState::keep));
}

TEST(CostModel, PartsAreFittedOneByOneAndAddUp) {
  MachineProfile profile = testing::test_profile();
  const ModelShape shape = testing::llama_3_8b();
  const Work work = work_of_depths(100, 900, true);
  const CostModel plain(shape, profile, DType::float32);
  const CostParts parts = plain.parts(work, SavedState::recompute);
  for (const double part : {parts.products, parts.attention, parts.rows, parts.head}) EXPECT_GT(part, 0);
  EXPECT_DOUBLE_EQ(plain.seconds(work, SavedState::recompute),
                   parts.products + parts.attention + parts.rows + parts.head);
  profile.fit = {2, 3, 5, 7};
  EXPECT_DOUBLE_EQ(CostModel(shape, profile, DType::float32).seconds(work, SavedState::recompute),
                   2 * parts.products + 3 * parts.attention + 5 * parts.rows + 7 * parts.head);
}

// Only narrow models are slower: gradients of weights, a third of the products, and attention, at the rates that were
// measured of such sums; between two widths by 1/width. Nothing else costs, so that the ratios are the rates' ratios.
TEST(CostModel, ShortSumsHaveRatesOfTheirOwn) {
  MachineProfile plain = testing::test_profile(), narrow = plain;
  const double gradients = plain.matrix_flops_per_second(MachineProfile::kGradientRows);
  plain.weight_gradient_flops_per_second = narrow.weight_gradient_flops_per_second = gradients;
  narrow.narrow_gradient_flops_per_second = gradients / 4;
  narrow.narrow_attention_flops_per_second = plain.attention_flops_per_second / 2;
  plain.seconds_per_call = narrow.seconds_per_call = 1e-40;
  plain.bytes_per_second = narrow.bytes_per_second = 1e40;
  const Work work = work_of_depths(0, 4096, true);
  const auto ratios = [&](const ModelShape& shape) {
    const CostParts before = CostModel(shape, plain, DType::float32).parts(work, SavedState::keep),
                    after = CostModel(shape, narrow, DType::float32).parts(work, SavedState::keep);
    EXPECT_EQ(after.rows, before.rows);
    EXPECT_EQ(after.head, before.head);
    return std::pair(after.products / before.products, after.attention / before.attention);
  };
  ModelShape shape = testing::tiny_shape();
  shape.hidden = 64, shape.layer = attention_layers(3, {.heads = 4, .kv_heads = 4, .head_dim = 16}, 64);
  EXPECT_DOUBLE_EQ(ratios(shape).first, 2);
  EXPECT_DOUBLE_EQ(ratios(shape).second, 2);
  // 1/128 - 1/1024 of 1/64 - 1/1024; 1/32 - 1/64 of 1/16 - 1/64.
  shape.hidden = 128, shape.layer = attention_layers(3, {.heads = 4, .kv_heads = 4, .head_dim = 32}, 128);
  EXPECT_DOUBLE_EQ(ratios(shape).first, 1 + 7.0 / 15);
  EXPECT_DOUBLE_EQ(ratios(shape).second, 1 + 1.0 / 3);
  const auto [products, attention] = ratios(testing::llama_3_8b());
  EXPECT_EQ(products, 1);
  EXPECT_EQ(attention, 1);
}

// Attention computes the half of a block of 64 rows that it masks: 32 pairs more for each row.
TEST(CostModel, AttentionPaysForTheMaskedHalfOfABlock) {
  const ModelShape shape = testing::llama_3_8b();
  const CostModel model(shape, testing::test_profile(), DType::float32, kForwardOnly);
  const auto seconds = [&](const Work& work) { return model.parts(work, SavedState::keep).attention; };
  EXPECT_DOUBLE_EQ(seconds({.rows = 100}), seconds({.pairs = 3200}));
  EXPECT_DOUBLE_EQ(seconds({.outputs = 100}), seconds({.output_pairs = 3200}));
}

TEST(MachineProfile, SurvivesJson) {
  MachineProfile profile = default_profile("cuda", DType::bfloat16, 1);
  profile.fit = {1.25, 0.75, 1.5, 1.125};
  profile.narrow_gradient_flops_per_second = 3e9, profile.narrow_attention_flops_per_second = 4e9;
  profile.fitted_steps = 20;
  EXPECT_NE(profile.line().find("fitted to 20 steps"), std::string::npos);
  const MachineProfile again = profile_of(to_json(profile), "profile.json");
  EXPECT_EQ(to_json(again), to_json(profile));
  EXPECT_EQ(again.line(), profile.line());
  for (const char* member :
       {"name", "dtype", "matrix", "attention_flops_per_second", "bytes_per_second", "seconds_per_call"}) {
    Json broken = to_json(profile);
    broken.erase(member);
    EXPECT_THROW(profile_of(broken, "profile.json"), InputError) << member;
  }
  Json broken = to_json(profile);
  broken["matrix"][1]["rows"] = 1;
  EXPECT_THROW(profile_of(broken, "profile.json"), InputError);
  broken["matrix"][1]["rows"] = -5;
  EXPECT_THROW(profile_of(broken, "profile.json"), InputError);
}

// A CPU multiplies the head in float32 whatever the dtype, and adds rounded gradients of weights piece by piece: each
// at the rate that was measured of it, the gradients a third of a layer's products.
TEST(CostModel, TheHeadAndGradientsOfWeightsHaveRatesOfTheirOwn) {
  const ModelShape shape = testing::llama_3_8b();
  MachineProfile plain = testing::test_profile(), own = plain;
  own.head_flops_per_second = plain.matrix_flops_per_second(MachineProfile::kHeadRows) / 4;
  own.weight_gradient_flops_per_second = plain.matrix_flops_per_second(MachineProfile::kGradientRows) / 4;
  const Work work = work_of_depths(0, 4096, true);
  const CostParts before = CostModel(shape, plain, DType::bfloat16).parts(work, SavedState::keep),
                  after = CostModel(shape, own, DType::bfloat16).parts(work, SavedState::keep);
  EXPECT_NEAR(after.products / before.products, 2, 0.05);
  EXPECT_NEAR(after.head / before.head, 4, 0.5);
  EXPECT_EQ(after.attention, before.attention);
  const CostParts forward = CostModel(shape, own, DType::bfloat16, kForwardOnly).parts(work, SavedState::keep);
  EXPECT_EQ(forward.products,
            CostModel(shape, plain, DType::bfloat16, kForwardOnly).parts(work, SavedState::keep).products);
}

}  // namespace
}  // namespace espalier
