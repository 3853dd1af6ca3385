// FLOPs against a count made row by row and product by product.
#include "espalier/forecast/flops.h"

#include <gtest/gtest.h>

#include <cmath>

#include "espalier/base/error.h"
#include "espalier/mixers/latent_attention/shape.h"
#include "espalier/shape/trained_parameters.h"
#include "tests/support/layers.h"
#include "tests/unit/plan/shapes.h"

namespace espalier {
namespace {

// Multiply-adds of every matrix product of one forward, layer by layer, times two.
double forward_by_hand(const ModelShape& s, double T, double O, double pairs, double output_pairs,
                       bool all_rows_choose = false) {
  const AttentionShape& a = testing::attention_of(s);
  double madds = 0, attention = 0;
  for (std::int64_t layer = 0; layer < s.layers(); ++layer) {
    const bool last = layer == s.layers() - 1 && !(all_rows_choose && s.has_experts(layer));
    const double rows = last ? O : T;
    madds += rows * s.hidden * a.query_width();  // q
    madds += 2 * T * s.hidden * a.key_width();   // k, v
    madds += rows * a.query_width() * s.hidden;  // o
    if (s.has_experts(layer)) {
      madds += rows * s.hidden * s.experts;
      madds += rows * s.experts_per_token * 3.0 * s.hidden * s.expert_inner;
    } else {
      madds += rows * 3.0 * s.hidden * s.at(layer).inner;
    }
    attention += 2 * 2.0 * a.query_width() * (last ? output_pairs : pairs);  // scores and values
  }
  madds += O * s.hidden * s.vocabulary;
  return 2 * madds + attention;
}

// Latents of 12 channels behind 4 heads of 5 plain, 6 rotated and 13 value channels; queries' of so many, or none.
void set_latents(ModelShape& shape, std::int64_t query) {
  const auto mixer = std::make_shared<const LatentAttention>(
      LatentShape{.heads = 4, .query = query, .key_value = 12, .plain = 5, .rotary = 6, .value = 13});
  for (LayerShape& layer : shape.layer) layer.mixer = mixer;
}

// Rows that carry a state cost the same at any depth.
TEST(Flops, OfTheDeltaRuleAreThoseOfRows) {
  ModelShape shape = testing::tiny_shape();
  ModelShape attention = shape;
  RecurrenceShape states;
  states.key_heads = 2, states.value_heads = 4, states.key_dim = 6, states.value_dim = 5, states.kernel = 4;
  testing::set_delta_rule(shape, states, {1});
  const AttentionShape& heads = testing::attention_of(attention);
  const Work work{100, 7000, 30, 2500}, deep{100, 70000, 30, 25000};
  const Flops flops = forward_flops(shape, work), plain = forward_flops(attention, work);
  const double M = static_cast<double>(shape.hidden), H = static_cast<double>(heads.query_width()),
               J = static_cast<double>(heads.key_width()), in = 44 + 20 + 8;
  EXPECT_NEAR(flops.layers - plain.layers, 2 * 100 * M * (in + 20 - 2 * H - 2 * J), 1e-6);
  EXPECT_NEAR(flops.attention + flops.states - plain.attention, 6.0 * 4 * 6 * 5 * 100 - 4 * H * 7000, 1e-6);
  EXPECT_EQ(forward_flops(shape, deep).layers, flops.layers);
  EXPECT_EQ(flops.head, plain.head);
  // In blocks of 64 rows, where the states before them are made again; attention has five products for two.
  const Flops backward = backward_flops(shape, work), plain_backward = backward_flops(attention, work);
  EXPECT_NEAR(backward.attention + backward.states - plain_backward.attention,
              100.0 * (4 * (6 + 14) * 6 * 5 + 64 * (4 * (5 * 5 + 4 * 6) + 2 * 2 * 6)) - 2.5 * 4 * H * 7000, 1e-6);
  EXPECT_NEAR(backward.layers, 2 * flops.layers, 1e-6);
}

// Latents add a product before that of the heads; heads of keys and values differ in size.
TEST(Flops, OfLatentAttentionEqualTheCountByHand) {
  ModelShape shape = testing::tiny_shape();
  set_latents(shape, 10);
  const Work work{100, 7000, 30, 2500};
  const double M = static_cast<double>(shape.hidden), F = static_cast<double>(shape.at(0).inner), H = 4,
               full = static_cast<double>(shape.layers() - 1);
  const double query_output = M * 10 + 10 * H * 11 + H * 13 * M, key_value = M * 18 + 12 * H * 18;
  const double rows = full * 100 + 30, pairs = full * 7000 + 2500;
  const Flops forward = forward_flops(shape, work), backward = backward_flops(shape, work);
  EXPECT_EQ(forward.layers, 2 * (rows * (query_output + 3 * M * F) + (full + 1) * 100 * key_value));
  EXPECT_EQ(forward.attention, 2 * H * (11 + 13) * pairs);
  EXPECT_NEAR(backward.attention, 2 * H * (3 * 11 + 2 * 13) * pairs, 1e-6);
  EXPECT_EQ(backward.layers, 2 * forward.layers);
  set_latents(shape, 0);
  EXPECT_EQ(forward.layers - forward_flops(shape, work).layers, 2 * rows * (M * 10 + 10 * H * 11 - M * H * 11));
}

// Costs of parts of the weights: a latent's projection, the heads' behind it.
TEST(Flops, OfLatentsThatAreHeldHaveNoWeightGradient) {
  ModelShape shape = testing::tiny_shape();
  set_latents(shape, 10);
  const Work work{100, 7000, 100, 7000};
  const double M = static_cast<double>(shape.hidden), H = 4, L = static_cast<double>(shape.layers());
  const double none = backward_flops(train_only(shape, "norms,embeddings"), work).layers;
  const auto added = [&](const char* words) {
    return backward_flops(train_only(shape, text_of("norms,embeddings,", words)), work).layers - none;
  };
  EXPECT_NEAR(added("q_a_proj"), L * 2 * 100 * M * 10, 1e-6);
  EXPECT_NEAR(added("q_b_proj"), L * 2 * 100 * 10 * H * 11, 1e-6);
  EXPECT_NEAR(added("kv_a_proj_with_mqa"), L * 2 * 100 * M * 18, 1e-6);
  EXPECT_NEAR(added("kv_b_proj"), L * 2 * 100 * 12 * H * 18, 1e-6);
}

// Projections of recurrent layers have weight gradients beside held ones, too.
TEST(Flops, OfRecurrentLayersThatTrainAloneHaveTheirWeightGradients) {
  ModelShape shape = testing::tiny_shape();
  RecurrenceShape states;
  states.key_heads = 2, states.value_heads = 4, states.key_dim = 6, states.value_dim = 5, states.kernel = 4;
  testing::set_delta_rule(shape, states, {1, 1, 1});
  const Work work{100, 7000, 100, 7000};
  const auto layers = [&](const char* words) { return backward_flops(train_only(shape, words), work).layers; };
  const double added = layers("norms,embeddings,model[.]layers[.].*linear_attn.*") - layers("norms,embeddings");
  EXPECT_NEAR(added, 3 * 2 * 100 * static_cast<double>(shape.hidden) * (44 + 20 + 8 + 20), 1e-6);
}

// One product for the gradient of an input, another for a weight's where it trains; nothing below the first layer that
// trains.
TEST(Flops, OfHeldParametersHaveNoWeightGradientAndNoBackwardBelowThem) {
  const Work work{1000, 700000, 300, 250000};
  for (const ModelShape& shape : {testing::tiny_shape(), testing::llama_3_8b(), testing::qwen3_30b_a3b()}) {
    const Flops forward = forward_flops(shape, work), all = backward_flops(shape, work);
    const Flops norms = backward_flops(train_only(shape, "norms"), work);
    EXPECT_NEAR(norms.layers / forward.layers, 1, 1e-13);
    EXPECT_NEAR(norms.attention / all.attention, 1, 1e-13);
    EXPECT_DOUBLE_EQ(norms.head, forward.head);
    EXPECT_NEAR(norms.experts, forward.experts, 1e-13 * forward.experts);
    const Flops projections = backward_flops(train_only(shape, "attention"), work);
    const Flops mlps = backward_flops(train_only(shape, shape.experts > 0 ? "router,experts" : "mlp"), work);
    EXPECT_NEAR((projections.layers + mlps.layers - norms.layers) / all.layers, 1, 1e-13);
    const std::string last = text_of("model[.]layers[.]", shape.layers() - 1, "[.].*");
    ModelShape others = shape;  // all layers before the last one
    const Flops of_last = backward_flops(train_only(shape, last), work);
    others.layer.pop_back();
    const Work every_row{work.rows, work.pairs, work.rows, work.pairs};  // no layer of them is narrow
    EXPECT_NEAR((of_last.layers + backward_flops(others, every_row).layers) / all.layers, 1, 1e-12);
    EXPECT_EQ(backward_flops(train_only(shape, "model[.]norm[.]weight"), work).layers, 0);
    const ModelShape upper = train_only(shape, last);
    EXPECT_NEAR(step_flops(upper, work, {}, SavedState::recompute).attention,
                forward.attention + of_last.attention + of_last.attention / 2.5, 1e-9 * forward.attention);
  }
}

TEST(Flops, EqualTheCountByHand) {
  for (const ModelShape& shape : {testing::tiny_shape(), testing::llama_3_8b(), testing::qwen3_30b_a3b()}) {
    const Work work{1000, 700000, 300, 250000};
    const double by_hand = forward_by_hand(shape, 1000, 300, 700000, 250000);
    // Sums of a few hundred products in double.
    EXPECT_NEAR(forward_flops(shape, work).total() / by_hand, 1, 1e-13);
    const Flops forward = forward_flops(shape, work), backward = backward_flops(shape, work);
    EXPECT_DOUBLE_EQ(backward.layers, 2 * forward.layers);
    EXPECT_DOUBLE_EQ(backward.experts, 2 * forward.experts);
    EXPECT_EQ(forward.experts > 0, shape.experts > 0);
    EXPECT_DOUBLE_EQ(backward.head, 2 * forward.head);
    EXPECT_DOUBLE_EQ(backward.attention, 2.5 * forward.attention);
    EXPECT_DOUBLE_EQ(step_flops(shape, work, {}, SavedState::keep).total(), forward.total() + backward.total());
    EXPECT_DOUBLE_EQ(step_flops(shape, work, {}, SavedState::recompute).total() -
                         step_flops(shape, work, {}, SavedState::keep).total(),
                     forward.layers + forward.experts + forward.attention);
    // Router losses: a last layer of experts runs all rows.
    const double routed_by_hand = forward_by_hand(shape, 1000, 300, 700000, 250000, true);
    EXPECT_NEAR(forward_flops(shape, work, true).total() / routed_by_hand, 1, 1e-13);
    EXPECT_NEAR(step_flops(shape, work, {.all_rows_choose = true, .counting_pass = true}, SavedState::keep).total() /
                    (forward_flops(shape, work, true).total() + backward_flops(shape, work, true).total() +
                     recompute_flops(shape, work, true).total()),
                1, 1e-13);
    EXPECT_DOUBLE_EQ(step_flops(shape, work, {.gradients = false}, SavedState::keep).total(), forward.total());
    // A loss of whole rollouts needs log-probs before any gradient: the head's logits are made twice.
    EXPECT_DOUBLE_EQ(step_flops(shape, work, {.whole_rollout = true}, SavedState::keep).head, 4 * forward.head);
  }
}

TEST(Flops, ATrunkWithoutEdgesHasNoHeadAndOnlyKeysAndValuesInItsLastLayer) {
  ModelShape one = testing::tiny_shape();
  one.layer.resize(1);
  const Flops flops = forward_flops(one, work_of_depths(0, 100, false));
  EXPECT_DOUBLE_EQ(flops.total(), 2.0 * 100 * one.hidden * 2 * testing::attention_of(one).key_width());
}

TEST(Flops, ADepthSeesItselfAndWhatIsAbove) {
  std::int64_t pairs = 0;
  for (std::int64_t depth = 7; depth < 31; ++depth) pairs += depth + 1;
  EXPECT_EQ(work_of_depths(7, 31, true), (Work{24, pairs, 24, pairs}));
  EXPECT_EQ(work_of_depths(7, 7, true), Work{});
}

// FLOPs dense / FLOPs shared of n responses to one prompt, counted as published: every layer whole for every row, the
// dense head on every row and the shared one on response rows only. Forward and backward are the same multiple of both.
double published_ceiling(const ModelShape& shape, std::int64_t prompt, std::int64_t response, std::int64_t n) {
  const Flops dense = forward_flops(shape, work_of_depths(0, prompt + response, true));
  Work once = work_of_depths(0, prompt, true);
  for (std::int64_t i = 0; i < n; ++i) once += work_of_depths(prompt, prompt + response, true);
  Flops shared = forward_flops(shape, once);
  shared.head *= static_cast<double>(n * response) / static_cast<double>(once.rows);
  return static_cast<double>(n) * dense.total() / shared.total();
}

TEST(Flops, GiveThePublishedCeilings) {
  const ModelShape shape = testing::llama_3_8b();
  const auto rounded = [&](std::int64_t prompt, std::int64_t n) {
    return std::round(100 * published_ceiling(shape, prompt, 12288 - prompt, n)) / 100;
  };
  EXPECT_DOUBLE_EQ(rounded(2048, 32), 1.16);
  EXPECT_DOUBLE_EQ(rounded(6144, 32), 1.79);
  EXPECT_DOUBLE_EQ(rounded(8192, 32), 2.56);
  EXPECT_DOUBLE_EQ(rounded(10240, 32), 4.65);
  EXPECT_DOUBLE_EQ(rounded(10240, 128), 5.07);
}

// Row by row: a layer with a window counts the pairs within it, the others all pairs.
TEST(Flops, OfLayersWithAWindowCountTheirPairs) {
  for (const std::int64_t window : {1, 2, 7, 40, 1000})
    for (const std::int64_t begin : {0, 1, 6, 7, 30}) {
      const Work work = work_of_depths(begin, begin + 25, true, window);
      std::int64_t pairs = 0, seen = 0;
      for (std::int64_t depth = begin; depth < begin + 25; ++depth)
        pairs += depth + 1, seen += std::min(depth + 1, window);
      EXPECT_EQ(work, (Work{25, pairs, 25, pairs, seen, seen})) << window << ", " << begin;
    }
  EXPECT_EQ(work_of_depths(3, 9, true, 0).window_pairs, 0);
  ModelShape shape = testing::tiny_shape();
  const Work work{1000, 700000, 300, 250000, 9000, 2000};
  const double each = 4.0 * static_cast<double>(testing::attention_of(shape).query_width());
  for (const std::vector<std::uint8_t>& layers :
       {std::vector<std::uint8_t>{0, 0, 0}, {1, 0, 0}, {0, 0, 1}, {1, 0, 1}, {1, 1, 1}}) {
    testing::change_attention(shape,
                              [&](AttentionShape& a, std::size_t layer) { a.window = layers[layer] != 0 ? 9 : 0; });
    const double full = layers[0] + layers[1] + 0.0,
                 expected = each * ((2 - full) * 700000 + full * 9000 + (layers[2] != 0 ? 2000 : 250000));
    EXPECT_DOUBLE_EQ(forward_flops(shape, work).attention, expected);
    EXPECT_DOUBLE_EQ(backward_flops(shape, work).attention, 2.5 * expected);
    const ModelShape held = train_only(shape, "norms");
    EXPECT_NEAR(backward_flops(held, work).attention / (2.5 * expected), 1, 1e-13);
    EXPECT_NEAR(step_flops(held, work, {}, SavedState::recompute).attention / (4.5 * expected), 1, 1e-13);
  }
}

}  // namespace
}  // namespace espalier
