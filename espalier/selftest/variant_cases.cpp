// Cases of what newer families have in place of Llama's blocks: other norms, rotations, activations, routers and
// experts, shaped logits, latent attention.
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/round.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>

#include "espalier/base/error.h"
#include "espalier/selftest/operation_check.h"

namespace espalier {
namespace {

using Kind = OperationCase::Kind;
using Tensors = std::vector<at::Tensor>;
using Ops = Operations;

// The mean of a row is a sum of its own; where it is taken off, the differences are as large as the row.
void add_norm_cases(std::vector<OperationCase>& cases, NormKind kind, const std::string& name) {
  struct Size {
    std::int64_t rows, width;
  };
  const bool centred = kind == NormKind::layer;
  for (const auto [rows, width] : {Size{3, 64}, Size{2, 2056}, Size{5, 515}, Size{531, 8}, Size{1, 9}}) {
    const std::string sizes = text_of(name, ", ", rows, " x ", width);
    const OperationCase::Argument stream{normal({rows, width}, 1)}, weight{normal({width}, 2)},
        bias{normal({width}, 3)}, rstd{normal({rows}, 4).abs() + 0.5, Kind::sum},
        y{normal({rows, width}, 5), Kind::activation, true};
    const auto weights = [=](const Tensors& t) { return NormWeights(t[1], kind, centred ? t[2] : at::Tensor()); };
    const double terms = 16 + 4 * static_cast<double>(width);
    cases.push_back({"norm",
                     sizes,
                     {stream, weight, bias, y, {rstd.value, Kind::sum, true}},
                     [=](const Ops& o, const Tensors& t) { o.norm(t[0], weights(t), 1e-6, t[3], t[4]); },
                     2,
                     terms});
    cases.push_back({"norm_again",
                     sizes,
                     {stream, weight, bias, rstd, y},
                     [=](const Ops& o, const Tensors& t) { o.norm_again(t[0], weights(t), t[3], t[4]); },
                     2,
                     terms});
    cases.push_back({"add_norm_backward",
                     sizes,
                     {stream,
                      weight,
                      bias,
                      rstd,
                      {normal({rows, width}, 6)},
                      y,
                      {normal({width}, 7), Kind::sum, true},
                      {normal({width}, 8), Kind::sum, true}},
                     [=](const Ops& o, const Tensors& t) {
                       o.add_norm_backward(t[0], weights(t), t[3], t[4], t[5],
                                           NormWeights(t[6], kind, centred ? t[7] : at::Tensor()));
                     },
                     1 + root(rows),
                     terms + static_cast<double>(rows) * root(rows)});
    cases.push_back(cases.back());
    cases.back().sizes += ", weight held";
    cases.back().call = [=](const Ops& o, const Tensors& t) {
      o.add_norm_backward(t[0], weights(t), t[3], t[4], t[5], NormWeights(at::Tensor(), kind));
    };
  }
}

struct RotationSize {
  std::int64_t rows, heads, head_dim, rotary, first;
  bool interleaved = false;
  enum class Norm { none, of_heads, of_rows } norm = Norm::none;
  NormKind kind = NormKind::rms;
};

void add_rotation_cases(std::vector<OperationCase>& cases, const RotationSize& s) {
  const bool norm = s.norm != RotationSize::Norm::none, wide = s.norm == RotationSize::Norm::of_rows;
  const std::int64_t width = s.heads * s.head_dim, normed = wide ? width : s.head_dim;
  const std::string sizes =
      text_of(s.rows, " x ", s.heads, " heads of ", s.head_dim, ", ", s.rotary, " rotate from ", s.first,
              s.interleaved ? ", interleaved" : "", norm ? wide ? ", norm of rows " : ", norm of heads " : "",
              norm ? text_of(static_cast<int>(s.kind)) : "");
  const at::Tensor angle = normal({9, s.rotary / 2}, 7, 3);
  std::vector<std::int32_t> positions;
  for (std::int64_t r = 0; r < s.rows; ++r) positions.push_back(static_cast<std::int32_t>((r * 5) % 9));
  const auto rotation = [=](const Tensors& t) {
    return Rotation{{t[0], t[1]}, t[2], norm ? t[3] : at::Tensor(), 1e-6, s.head_dim, s.interleaved, s.kind, s.first};
  };
  const auto part = [width](const at::Tensor& x) { return x.narrow(1, 2, width); };
  const auto row = [&](std::uint64_t seed) { return normal({s.rows, width + 3}, seed); };
  const std::vector<OperationCase::Argument> tables = {{angle.cos(), Kind::sum},
                                                       {angle.sin(), Kind::sum},
                                                       {whole_numbers(positions), Kind::fixed},
                                                       {normal({normed}, 8)},
                                                       {row(9)}};
  OperationCase forward{"rotate", sizes, tables, {}, 6, 16 + static_cast<double>(normed)};
  forward.arguments.push_back({row(10), Kind::activation, true});
  forward.call = [=](const Ops& o, const Tensors& t) { o.rotate(rotation(t), part(t[4]), part(t[5])); };
  cases.push_back(forward);
  OperationCase in_place{"rotate", sizes + ", in place", tables, {}, 6, forward.terms};
  in_place.arguments[4].result = true;
  in_place.call = [=](const Ops& o, const Tensors& t) { o.rotate(rotation(t), part(t[4]), part(t[4])); };
  cases.push_back(in_place);
  const double items = static_cast<double>(s.rows * s.heads), sum = items * std::sqrt(items);
  for (const Kind kind : {Kind::activation, Kind::sum}) {
    OperationCase backward{"add_rotate_backward",    sizes + (kind == Kind::sum ? ", sums" : ""), tables, {},
                           6 + 3 * std::sqrt(items), 24 + static_cast<double>(normed) + sum};
    backward.arguments.push_back({row(11), kind});
    backward.arguments.push_back({row(12), Kind::activation, true});
    backward.arguments.push_back({normal({normed}, 13), Kind::sum, true});
    backward.call = [=](const Ops& o, const Tensors& t) {
      o.add_rotate_backward(rotation(t), part(t[4]), part(t[5]), part(t[6]), norm ? t[7] : at::Tensor());
    };
    cases.push_back(backward);
    if (!norm) continue;
    backward.sizes += ", weight held";
    backward.call = [=](const Ops& o, const Tensors& t) {
      o.add_rotate_backward(rotation(t), part(t[4]), part(t[5]), part(t[6]), at::Tensor());
    };
    cases.push_back(backward);
  }
}

// exp and tanh of |g| up to 8 are off by as many units; f, its slope and products. Some gates and ups are behind the
// clamp's limits.
void add_activation_cases(std::vector<OperationCase>& cases, const ActivationRule& rule, const std::string& name) {
  struct Size {
    std::int64_t rows, width;
  };
  const std::int64_t each = rule.gated ? 2 : 1;
  for (const auto [rows, width] : {Size{1, 1}, Size{3, 8}, Size{2, 1032}, Size{5, 77}, Size{0, 8}}) {
    const std::string sizes = text_of(name, rule.gated ? ", " : " without a gate, ", rows, " x ", width);
    const OperationCase::Argument gate_up{normal({rows, each * width}, 14)}, grad{normal({rows, width}, 15)};
    cases.push_back({"swiglu",
                     sizes,
                     {gate_up, {grad.value, Kind::activation, true}},
                     [rule](const Ops& o, const Tensors& t) { o.swiglu(rule, t[0], t[1]); },
                     2,
                     24});
    cases.push_back({"swiglu_backward",
                     sizes,
                     {gate_up,
                      grad,
                      {normal({rows, each * width}, 16), Kind::activation, true},
                      {grad.value, Kind::activation, true}},
                     [rule](const Ops& o, const Tensors& t) { o.swiglu_backward(rule, t[0], t[1], t[2], t[3]); },
                     2,
                     48});
    cases.push_back({"swiglu_backward",
                     sizes + ", in place",
                     {{gate_up.value, Kind::activation, true}, {grad.value, Kind::activation, true}},
                     [rule](const Ops& o, const Tensors& t) { o.swiglu_backward(rule, t[0], t[1], t[0], t[1]); },
                     2,
                     48});
  }
}

void add_scaled_cases(std::vector<OperationCase>& cases, std::int64_t rows, std::int64_t width) {
  const std::string sizes = text_of(rows, " x ", width);
  const OperationCase::Argument base{normal({rows, width}, 20), Kind::activation, true},
      x{normal({rows, width}, 21), Kind::activation, true}, out{normal({rows, width}, 22), Kind::activation, true};
  cases.push_back({"add_scaled",
                   sizes,
                   {base, x, out},
                   [](const Ops& o, const Tensors& t) { o.add_scaled(t[0], t[1], 0.37, t[2]); },
                   2,
                   2});
  cases.push_back({"add_scaled",
                   sizes + ", in place",
                   {base, x, out},
                   [](const Ops& o, const Tensors& t) {
                     o.add_scaled(t[0], t[1], 0.37, t[0]);
                     o.add_scaled({}, t[1], 1.7, t[1]);
                     o.add_scaled({}, t[1], 0.3, t[2]);
                   },
                   3,
                   4});
}

struct RouterSize {
  std::int64_t rows, experts, chosen;
  bool sigmoid;
  std::int64_t groups, top_groups;
  double scaling;
  bool corrected, renormalise;
};

// Scores of float32 and bfloat16 could stand in another order than in float64: logits are few whole numbers, far
// apart, and the correction is a multiple of 1/8 of any score's distance.
void add_router_cases(std::vector<OperationCase>& cases, const RouterSize& s) {
  const std::int64_t R = s.rows, E = s.experts, k = s.chosen, groups = s.groups, top = s.top_groups;
  const bool sigmoid = s.sigmoid, corrected = s.corrected, renormalise = s.renormalise;
  const double scaling = s.scaling;
  const std::string sizes =
      text_of(R, " rows, ", k, " of ", E, " experts", sigmoid ? ", sigmoids" : "",
              groups > 1 ? text_of(", ", top, " of ", groups, " groups") : "", corrected ? ", corrected" : "",
              renormalise ? ", renormalised" : "", ", scaled by ", scaling);
  const OperationCase::Argument logits{at::round(normal({R, E}, 72, 2))},
      correction{at::round(normal({E}, 73, 4)) / 8, Kind::sum};
  const auto rule = [=](const at::Tensor& c) {
    RouterRule of(renormalise);
    of.sigmoid = sigmoid, of.groups = groups, of.top_groups = top, of.scaling = scaling;
    if (corrected) of.correction_E = c;
    return of;
  };
  std::vector<std::int32_t> recorded, group;
  for (std::int64_t r = 0; r < R; ++r) {
    group.push_back(static_cast<std::int32_t>(r % 2));
    for (std::int64_t j = 0; j < k; ++j)
      recorded.push_back(static_cast<std::int32_t>(r % 3 == 0 && j == 0 ? -1 : (r + 3 * j) % E));
  }
  const double terms = 16 + static_cast<double>(E);
  for (const bool given : {false, true})
    cases.push_back({"choose_experts",
                     sizes + (given ? ", recorded" : ""),
                     {logits,
                      correction,
                      {whole_numbers(recorded).view({R, k}), Kind::fixed},
                      {at::zeros({R, k}, at::kInt), Kind::fixed, true},
                      {at::zeros({R, k}, at::kDouble), Kind::sum, true}},
                     [=](const Ops& o, const Tensors& t) {
                       o.choose_experts(t[0], given ? t[2] : at::Tensor(), rule(t[1]), t[3], t[4]);
                     },
                     1,
                     terms});
  std::vector<std::int32_t> choice;
  for (std::int64_t r = 0; r < R; ++r)
    for (std::int64_t j = 0; j < k; ++j) choice.push_back(static_cast<std::int32_t>((r + 3 * j) % E));
  for (const bool penalised : {false, true})
    cases.push_back({"router_backward",
                     sizes + (penalised ? ", penalties" : ""),
                     {logits,
                      correction,
                      {whole_numbers(choice).view({R, k}), Kind::fixed},
                      {normal({R, k}, 74), Kind::sum},
                      {whole_numbers(group), Kind::fixed},
                      {normal({2, E}, 75), Kind::fixed},
                      {normal({2}, 76).abs(), Kind::fixed},
                      {normal({R, E}, 77), Kind::activation, true},
                      {normal({2}, 78), Kind::fixed, penalised}},
                     [=](const Ops& o, const Tensors& t) {
                       o.router_backward(t[0], t[2], rule(t[1]), t[3],
                                         penalised ? RouterPenalty{t[4], t[5], t[6]} : RouterPenalty{}, t[7],
                                         penalised ? t[8] : at::Tensor());
                     },
                     1,
                     8 * terms * root(R)});
}

// Experts with biases and an activation that is not SwiGLU; expert E - 1 has no rows. Held: of weights, of biases.
void add_expert_cases(std::vector<OperationCase>& cases, std::int64_t R, std::int64_t E, std::int64_t k,
                      std::int64_t width, const ActivationRule& rule, bool biases) {
  const std::int64_t S = R * k, F = width / 2 + 1;
  const std::string sizes = text_of(R, " x ", width, ", ", k, " of ", E, " experts", biases ? " with biases" : "",
                                    rule.gated ? "" : " without gates");
  const std::int64_t W = (rule.gated ? 2 : 1) * F;
  std::vector<std::int32_t> choice;
  for (std::int64_t r = 0; r < R; ++r)
    for (std::int64_t j = 0; j < k; ++j) choice.push_back(static_cast<std::int32_t>((r * r + j) % (E - 1)));
  const auto indices = [](std::int64_t count) {
    return OperationCase::Argument{at::full({count}, 7, at::kInt), Kind::fixed};
  };
  const double products = 8 * root(width) * (static_cast<double>(width) + static_cast<double>(R));
  OperationCase forward{"add_experts", sizes, {}, {}, 12, products};
  forward.arguments = {{whole_numbers(choice).view({R, k}), Kind::fixed},
                       indices(E + 1),
                       indices(S),
                       indices(S),
                       {normal({E, W, width}, 86, 0.2)},
                       {normal({E, width, F}, 87, 0.2)},
                       {normal({E, W}, 96)},
                       {normal({E, width}, 97)},
                       {normal({R, width}, 88)},
                       {normal({R, k}, 89), Kind::sum},
                       {at::zeros({S, W}, at::kDouble), Kind::activation, true},
                       {normal({R, width}, 90), Kind::sum, true},
                       {at::zeros({R, width}, at::kDouble)},
                       {at::zeros({R, F}, at::kDouble)}};
  const auto slots = [](const Tensors& t) { return SortedSlots{t[1], t[2], t[3]}; };
  const auto weights = [=](const Tensors& t) {
    return ExpertWeights{t[4], t[5], biases ? t[6] : at::Tensor(), biases ? t[7] : at::Tensor(), rule};
  };
  const auto run = [=](const Ops& o, const Tensors& t) {
    o.sort_by_expert(t[0], slots(t));
    o.add_experts(slots(t), weights(t), t[8], t[9], t[10], t[11], {t[12], t[13], {}, {}});
  };
  forward.call = run;
  cases.push_back(forward);
  OperationCase backward = forward;
  backward.operation = "add_experts_backward";
  backward.roundings = 24;
  for (const auto& [shape, seed] :
       {std::pair{std::vector<std::int64_t>{R, width}, 91}, std::pair{std::vector<std::int64_t>{E, W, width}, 92},
        std::pair{std::vector<std::int64_t>{E, width, F}, 93}, std::pair{std::vector<std::int64_t>{E, W}, 98},
        std::pair{std::vector<std::int64_t>{E, width}, 99}, std::pair{std::vector<std::int64_t>{R, width}, 94},
        std::pair{std::vector<std::int64_t>{R, k}, 95}})
    backward.arguments.push_back(
        {normal(shape, static_cast<std::uint64_t>(seed)), seed == 91 ? Kind::activation : Kind::sum, seed != 91});
  backward.arguments.push_back({at::zeros({R, W}, at::kDouble)});
  backward.arguments.push_back({at::zeros({W * width}, at::kDouble)});
  for (const int held : {0, 1, 2, 3}) {  // nothing, weights, biases, the slots' weights
    backward.sizes = sizes + (held == 0   ? ""
                              : held == 1 ? ", weights held"
                              : held == 2 ? ", biases held"
                                          : ", of weight 1");
    if (held == 2 && !biases) continue;
    backward.call = [=](const Ops& o, const Tensors& t) {
      run(o, t);
      ExpertWeights grads{t[15], t[16], t[17], t[18]};
      if (held == 1) grads.gate_up_EWM = grads.down_EMF = at::Tensor();
      if (held == 2 || !biases) grads.gate_up_bias_EW = grads.down_bias_EM = at::Tensor();
      const bool weighed = held != 3;
      o.add_experts_backward(slots(t), weights(t), t[8], weighed ? t[9] : at::Tensor(), t[10], t[14], grads, t[19],
                             weighed ? t[20] : at::Tensor(), {t[12], t[13], t[21], t[22]});
    };
    cases.push_back(backward);
  }
}

// Logits of a factor and a cap; the caps' slopes are differences of numbers up to 1.
void add_shaped_logit_cases(std::vector<OperationCase>& cases, std::int64_t rows, std::int64_t V,
                            const LogitShape& shape) {
  const std::string sizes = text_of(rows, " x ", V, ", times ", shape.scale, ", cap ", shape.cap);
  std::vector<std::int32_t> begin{7}, target;
  for (std::int64_t b = 0; b < rows; ++b) {
    for (std::int64_t e = 0; e < b % 3 + 1; ++e)
      target.push_back(static_cast<std::int32_t>((b * 31 + e * 17 + 3) % (V + 4)));
    begin.push_back(static_cast<std::int32_t>(7 + target.size()));
  }
  const auto edges = static_cast<std::int64_t>(target.size());
  const auto numbers = [](std::int64_t count) {
    return OperationCase::Argument{at::zeros({count}, at::kDouble), Kind::fixed};
  };
  OperationCase one{"shape_logits, logit_gradients", sizes, {}, {}, 0, 512 + 64 * root(V)};
  one.arguments = {{at::full({rows}, 0.8, at::kDouble), Kind::fixed},
                   {whole_numbers(begin), Kind::fixed},
                   {whole_numbers(target), Kind::fixed},
                   numbers(rows),
                   numbers(rows),
                   numbers(rows),
                   numbers(edges),
                   {at::zeros({edges}, at::kDouble), Kind::fixed, true},
                   numbers(edges),
                   {normal({rows, V}, 60, 2), Kind::sum, true},
                   {normal({edges}, 62), Kind::fixed},
                   {normal({edges}, 63), Kind::fixed}};
  one.call = [shape](const Ops& o, const Tensors& t) {
    const EdgeBlock block{t[0], t[1], t[2], shape};
    const LogitSums sums{t[3], t[4], t[5]};
    o.shape_logits(shape, t[9]);
    o.logit_sums(block, 2, t[9], sums, t[6]);
    o.score_edges(block, t[6], sums, t[7], t[8]);
    o.logit_gradients(block, 2, sums, t[10], t[11], t[9]);
  };
  cases.push_back(one);
}

void add_latent_cases(std::vector<OperationCase>& cases, std::int64_t rows, std::int64_t J, std::int64_t N,
                      std::int64_t K, std::int64_t V) {
  const std::string sizes = text_of(rows, " rows, ", J, " heads of ", N, " + ", K, " and ", V);
  const auto part = [](const at::Tensor& x) { return x.narrow(1, 0, x.size(1) - 3); };
  cases.push_back(
      {"expand_heads",
       sizes,
       {{normal({rows, J * (N + V) + 3}, 120)},
        {normal({rows, K + 3}, 121)},
        {normal({rows, J * (N + K) + 3}, 122), Kind::activation, true},
        {normal({rows, J * V + 3}, 123), Kind::activation, true}},
       [part](const Ops& o, const Tensors& t) { o.expand_heads(part(t[0]), part(t[1]), part(t[2]), part(t[3])); },
       0});
  cases.push_back({"expand_heads_backward",
                   sizes,
                   {{normal({rows, J * (N + K) + 3}, 124), Kind::sum},
                    {normal({rows, J * V + 3}, 125), Kind::sum},
                    {normal({rows, J * (N + V) + 3}, 126), Kind::activation, true},
                    {normal({rows, K + 3}, 127), Kind::sum, true}},
                   [part](const Ops& o, const Tensors& t) {
                     o.expand_heads_backward(part(t[0]), part(t[1]), part(t[2]), part(t[3]));
                   },
                   1,
                   static_cast<double>(J)});
}

}  // namespace

std::vector<OperationCase> variant_cases() {
  using Norm = RotationSize::Norm;
  std::vector<OperationCase> cases;
  add_norm_cases(cases, NormKind::rms_once, "rounded once");
  add_norm_cases(cases, NormKind::rms_plus_one, "1 + weight");
  add_norm_cases(cases, NormKind::layer, "LayerNorm");
  for (const RotationSize& size :
       {RotationSize{5, 3, 64, 16, 0, false, Norm::of_heads, NormKind::rms_plus_one}, RotationSize{3, 2, 96, 32, 64},
        RotationSize{4, 2, 40, 20, 0, true}, RotationSize{2, 3, 24, 16, 8, true},
        RotationSize{7, 3, 16, 16, 0, false, Norm::of_rows, NormKind::rms_once},
        RotationSize{530, 1, 8, 4, 0, false, Norm::of_rows},
        RotationSize{600, 4, 6, 6, 0, false, Norm::of_heads, NormKind::rms_once}, RotationSize{3, 2, 10, 0, 0},
        RotationSize{0, 2, 8, 4, 0, false, Norm::of_heads}})
    add_rotation_cases(cases, size);
  for (const bool gated : {true, false})
    for (const auto& [kind, name] :
         {std::pair{Activation::gelu, "gelu"}, std::pair{Activation::gelu_tanh, "gelu by tanh"}})
      add_activation_cases(cases, {kind, 0, gated}, name);
  add_activation_cases(cases, {Activation::silu, 0, false}, "silu");
  add_activation_cases(cases, {Activation::relu_squared, 0, false}, "the square of relu");
  add_activation_cases(cases, {Activation::clamped, 0.75, true}, "clamped");
  for (const auto& [rows, width] : {std::pair{1, 1}, std::pair{5, 24}, std::pair{3, 77}, std::pair{2, 2056}})
    add_scaled_cases(cases, rows, width);
  for (const RouterSize& size :
       {RouterSize{5, 8, 2, true, 1, 1, 1, false, true}, RouterSize{6, 64, 6, true, 8, 3, 2.5, true, true},
        RouterSize{7, 67, 4, false, 1, 1, 1.5, true, false}, RouterSize{4, 60, 3, false, 6, 2, 0.5, false, false},
        RouterSize{3, 96, 12, true, 48, 7, 1, true, false}, RouterSize{2, 4, 4, true, 4, 4, 1, false, false},
        RouterSize{3, 1, 1, true, 1, 1, 1, false, false}})
    add_router_cases(cases, size);
  const ActivationRule clamped{Activation::clamped, 0.75, true};
  add_expert_cases(cases, 7, 6, 2, 24, clamped, true);
  add_expert_cases(cases, 40, 5, 2, 10, clamped, true);
  add_expert_cases(cases, 16, 4, 2, 16, {Activation::gelu_tanh, 0, true}, false);
  add_expert_cases(cases, 16, 4, 2, 16, {Activation::relu_squared, 0, false}, false);
  add_expert_cases(cases, 6, 9, 3, 300, {}, true);
  add_shaped_logit_cases(cases, 4, 33, {0.125, 0});
  add_shaped_logit_cases(cases, 5, 260, {1, 3});
  add_shaped_logit_cases(cases, 130, 16, {0.5, 2});
  add_latent_cases(cases, 3, 2, 5, 4, 7);
  add_latent_cases(cases, 2, 16, 32, 16, 24);
  return cases;
}

}  // namespace espalier
