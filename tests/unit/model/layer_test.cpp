// A whole block, beside autograd: the order of its halves, narrow last blocks, and what is computed again.
#include "espalier/model/layer.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/support/layers.h"
#include "tests/unit/model/one_layer.h"

namespace espalier::testing {
namespace {

using at::Tensor;

constexpr std::int64_t kHeads = 2, kKeyHeads = 1, kDim = 4, kRows = 5;

ModelShape block_shape(NormPlace place, double residual = 1) {
  ModelShape shape;
  shape.architecture = "LlamaForCausalLM";
  shape.hidden = 6, shape.vocabulary = 5, shape.max_positions = 8;
  shape.layer = attention_layers(
      1, {.heads = kHeads, .kv_heads = kKeyHeads, .head_dim = kDim, .qkv_bias = true, .output_bias = true}, 7);
  set_norm_place(shape, place);
  shape.scales.residual = residual;
  return shape;
}

// Causal attention of all rows, whose positions are all 0.
Tensor plain_attention(const Tensor& normed, const LayerViews& w) {
  const Tensor q = plain_product(normed, w.mixer.products[Attention::query]);
  const Tensor kv = plain_product(normed, w.mixer.products[Attention::key_value]);
  const Tensor k = kv.slice(1, 0, kKeyHeads * kDim), v = kv.slice(1, kKeyHeads * kDim);
  const Tensor hidden = at::ones({normed.size(0), normed.size(0)}, at::kBool).triu(1);
  std::vector<Tensor> heads;
  for (std::int64_t h = 0; h < kHeads; ++h)
    heads.push_back((q.slice(1, h * kDim, (h + 1) * kDim).mm(k.t()) / std::sqrt(static_cast<double>(kDim)))
                        .masked_fill(hidden, -INFINITY)
                        .softmax(1)
                        .mm(v));
  return at::concat(heads, 1);
}

// Rows `out` of the block, all where there are none.
Tensor plain_block(const Tensor& x, const LayerViews& w, const ModelShape& shape, const Tensor& out) {
  Tensor mixed = plain_attention(plain_norm(x, w.mixer_norm_M, shape.rms_norm_eps), w), stream = x;
  if (out.numel() > 0) mixed = mixed.index_select(0, out), stream = stream.index_select(0, out);
  const Tensor y = plain_branch(stream, mixed, w.mixer.products[Attention::output], w.mixer_post_norm_M, shape);
  return plain_dense_mlp(y, w, shape);
}

struct BlockCase {
  const char* name;
  NormPlace place;
  double residual;
  std::vector<std::int32_t> outputs;  // empty: no row has one, and all rows continue
};
void PrintTo(const BlockCase& c, std::ostream* out) { *out << c.name; }

class Block : public ::testing::TestWithParam<BlockCase> {
 protected:
  Block() : one_(block_shape(GetParam().place, GetParam().residual), kRows, GetParam().outputs) {}
  LayerContext context() { return one_.context(narrow()); }
  static bool narrow() { return !GetParam().outputs.empty(); }
  std::int64_t continuing() const { return narrow() ? static_cast<std::int64_t>(GetParam().outputs.size()) : kRows; }
  // With what `state` recomputes forgotten and computed again.
  Tensor forward(ItemState state = {}) {
    const LayerContext c = context();
    one_.saved = {};
    one_.saved.stream_in_TM = one_.stream;
    take_mixer_saved(c, one_.saved);
    const LayerSaved empty_half = one_.saved;
    take_mlp_saved(c, one_.saved);
    const Tensor out = at::empty({continuing(), one_.stream.size(1)}, at::kDouble);
    layer_forward(c, one_.saved, out);
    if (!state.recomputes()) return out;
    one_.saved = empty_half;  // its tensors are those that the forward has filled
    if (state.recomputes_attention()) one_.saved = {}, one_.saved.stream_in_TM = one_.stream;
    layer_forward_again(c, one_.saved, state);
    return out;
  }
  // dL/dx, with the gradients of the parameters.
  Tensor backward(const Tensor& grad) {
    const Tensor grad_stream = grad.clone(), grad_in = narrow() ? at::full_like(one_.stream, 3.0) : grad_stream;
    add_layer_backward(context(), one_.saved, grad_stream, grad_in, one_.gradient());
    return grad_in;
  }

  OneLayer one_;
};

TEST_P(Block, ForwardAndBackwardAreThoseOfAutograd) {
  LayerViews leaves = one_.leaves();
  const Tensor x = one_.stream.clone().requires_grad_();
  const Tensor expected = plain_block(x, leaves, one_.model.shape, one_.input.output_row_O);
  const Tensor grad = at::randn_like(expected);
  (expected * grad).sum().backward();
  EXPECT_LE(distance(forward(), expected.detach()), kSumsOfOneLayer);
  EXPECT_LE(distance(backward(grad), x.grad()), kSumsOfOneLayer);
  EXPECT_LE(one_.distance_from(leaves), kSumsOfOneLayer);
}

TEST_P(Block, AnyStateOfTheItemGivesTheSameBits) {
  const Tensor out = forward(), grad = at::randn_like(out), grad_in = backward(grad),
               of_weights = one_.gradients->flat().clone();
  using Member = ItemState::Member;
  for (const ItemState state : {ItemState(Member::keep, Member::recompute, Member::recompute),
                                ItemState(Member::keep, Member::keep, Member::recompute)}) {
    one_.gradients->zero();
    EXPECT_TRUE(forward(state).equal(out));
    EXPECT_TRUE(backward(grad).equal(grad_in));
    EXPECT_TRUE(one_.gradients->flat().equal(of_weights));
  }
}

INSTANTIATE_TEST_SUITE_P(Blocks, Block,
                         ::testing::Values(BlockCase{"before", NormPlace::before, 1, {}},
                                           BlockCase{"both", NormPlace::both, 1, {}},
                                           BlockCase{"scaled", NormPlace::before, 0.5, {}},
                                           BlockCase{"after", NormPlace::after, 1, {}},
                                           BlockCase{"narrow", NormPlace::before, 1, {1, 4}},
                                           BlockCase{"narrowAfter", NormPlace::after, 1, {0, 2, 3}}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace espalier::testing
