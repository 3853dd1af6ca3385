// A layer of experts beside a dense MLP of the same FLOPs (inner width k F) over the same rows: forward and backward of
// each, in turns. The experts' products run over the rows of one expert at a time, R k / E of them where routing is
// even.
//
//   expert_bench [rounds 7] [rows of one expert 128] [experts 64] [k 8] [width 1024] [expert width 384] [dtype float32]
//
// One JSON object: rate of the experts' products over that of the dense ones (router included), the same of everything
// (gathering, sums, norms), and the rates in GFLOP/s.
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/randn.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "bench/spread.h"
#include "espalier/device/scalar_type.h"
#include "espalier/gradient/gradient_set.h"
#include "espalier/mixers/attention/shape.h"
#include "espalier/model/layer.h"
#include "espalier/model/mlp.h"
#include "espalier/model/path_source.h"
#include "espalier/state/model_state.h"

namespace {

using namespace espalier;

struct Sizes {
  std::int64_t rows_of_expert = 128, experts = 64, chosen = 8, width = 1024, inner = 384;
  std::int64_t rows() const { return rows_of_expert * experts / chosen; }
  // Three products forward and twice that backward, over k experts a row.
  double expert_flops() const { return 3.0 * 2 * 3 * static_cast<double>(rows() * chosen * width * inner); }
};

ModelShape shape_of(const Sizes& sizes, bool experts) {
  ModelShape shape;
  shape.architecture = experts ? "Qwen3MoeForCausalLM" : "Qwen3ForCausalLM";
  shape.hidden = sizes.width, shape.vocabulary = 16, shape.max_positions = 16, shape.tied_head = true;
  shape.layer = attention_layers(1, {.heads = 1, .kv_heads = 1, .head_dim = 64, .qk_norm = true},
                                 sizes.chosen * sizes.inner, experts ? MlpKind::experts : MlpKind::dense);
  if (!experts) return shape;
  shape.experts = sizes.experts, shape.experts_per_token = sizes.chosen, shape.expert_inner = sizes.inner;
  shape.norm_topk_prob = true;
  return shape;
}

// One MLP and what its passes need. A forward comes before every backward, which may overwrite what was saved.
class Mlp {
 public:
  Mlp(const Sizes& sizes, bool experts, DType dtype)
      : model_(random_model(shape_of(sizes, experts), dtype, 1)),
        gradients_(model_->table, model_->shape, accumulator_type(scalar_type(dtype))),
        arena_(std::int64_t{16} << 30),
        path_(model_->shape, 0, scalar_type(dtype), false, arena_) {
    input_.id.resize(static_cast<std::size_t>(sizes.rows()));
    const at::TensorOptions options = at::dtype(scalar_type(dtype));
    stream_ = at::randn({sizes.rows(), sizes.width}, at::kFloat).to(options.dtype());
    grad_ = at::randn({sizes.rows(), sizes.width}, at::kFloat).to(options.dtype());
    out_ = at::empty_like(stream_), grad_stream_ = at::empty_like(grad_);
  }

  struct Seconds {
    double products = 0, all = 0;
  };
  Seconds run() {
    const ArenaScope scope(arena_);
    Timer timer;
    const LayerContext context{
        model_->shape, model_->shape.at(0), model_->decoder.weights().layers[0], {}, input_, kv_, 0, false, arena_,
        &timer,        mesh_of_one()};
    LayerSaved saved;
    saved.stream_in_TM = stream_;
    take_mixer_saved(context, saved);
    take_mlp_saved(context, saved);
    saved.stream_mid_RM.copy_(stream_);
    grad_stream_.copy_(grad_);
    mlp_forward(context, saved, out_);
    add_mlp_backward(context, saved, grad_stream_, gradients_.views().layers[0]);
    return {timer.seconds(part::kProducts), timer.total()};
  }

 private:
  std::unique_ptr<ModelState> model_;
  GradientSet gradients_;
  Arena arena_;
  OpenPath path_;
  PathSource kv_{path_, 0, false, {}};
  ModelInput input_;
  at::Tensor stream_, grad_, out_, grad_stream_;
};

}  // namespace

int main(int count, char** arguments) {
  const auto number = [&](int at, std::int64_t otherwise) {
    return at < count ? std::atoll(arguments[at]) : static_cast<long long>(otherwise);
  };
  Sizes sizes;
  const std::int64_t rounds = number(1, 7);
  sizes.rows_of_expert = number(2, sizes.rows_of_expert), sizes.experts = number(3, sizes.experts);
  sizes.chosen = number(4, sizes.chosen), sizes.width = number(5, sizes.width), sizes.inner = number(6, sizes.inner);
  const DType dtype = parse_dtype(count > 7 ? arguments[7] : "float32");
  at::manual_seed(1);
  Mlp experts(sizes, true, dtype), dense(sizes, false, dtype);
  std::vector<double> expert_products, dense_products, expert_all, dense_all;
  for (std::int64_t round = -1; round < rounds; ++round) {
    const Mlp::Seconds e = experts.run(), d = dense.run();
    if (round < 0) continue;  // the first touches memory
    expert_products.push_back(e.products), expert_all.push_back(e.all);
    dense_products.push_back(d.products), dense_all.push_back(d.all);
  }
  std::printf("{\"rows\": %lld, \"rows_of_expert\": %lld, \"experts\": %lld, \"k\": %lld, \"dtype\": \"%s\", ",
              static_cast<long long>(sizes.rows()), static_cast<long long>(sizes.rows_of_expert),
              static_cast<long long>(sizes.experts), static_cast<long long>(sizes.chosen), name_of(dtype));
  std::printf("\"gflops\": {\"experts\": %.1f, \"dense\": %.1f}, ",
              1e-9 * sizes.expert_flops() / bench::median(expert_products),
              1e-9 * sizes.expert_flops() / bench::median(dense_products));
  bench::print_spread("products_rate", bench::ratios(dense_products, expert_products));
  std::printf(", ");
  bench::print_spread("whole_rate", bench::ratios(dense_all, expert_all));
  std::printf("}\n");
  return 0;
}
