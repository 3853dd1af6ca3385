// Cases of blocks of logits, experts, the optimizer and sampling.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/remainder.h>
#include <ATen/ops/round.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include "espalier/base/error.h"
#include "espalier/selftest/operation_check.h"

namespace espalier {
namespace {

using Kind = OperationCase::Kind;
using Tensors = std::vector<at::Tensor>;
using Ops = Operations;

// Edges of rows: row b has (b + 1) % 3 of them, the last row five, some to one token.
struct EdgeCase {
  at::Tensor temperature, begin, target;
  std::int64_t edges;
};
EdgeCase edges_of(std::int64_t rows, std::int64_t vocabulary) {
  std::vector<std::int32_t> begin{7}, target;  // begins are counted from the first one
  std::vector<double> temperature;
  for (std::int64_t b = 0; b < rows; ++b) {
    const std::int64_t here = b + 1 == rows ? 5 : (b + 1) % 3;
    for (std::int64_t e = 0; e < here; ++e)
      target.push_back(static_cast<std::int32_t>((b * 31 + e / 2 * 17 + 3) % (vocabulary + 4)));
    begin.push_back(begin.back() + static_cast<std::int32_t>(here));
    temperature.push_back(b % 2 == 0 ? 1.0 : 0.7 + 0.1 * static_cast<double>(b));
  }
  return {at::tensor(temperature, at::kDouble), whole_numbers(begin), whole_numbers(target),
          static_cast<std::int64_t>(target.size())};
}

// `close`: the two largest logits, in the first and the last column, are one where they are made exponents of.
void add_logit_cases(std::vector<OperationCase>& cases, std::int64_t rows, std::int64_t V, double scale,
                     bool close = false) {
  const std::string sizes = text_of(rows, " x ", V, scale > 100 ? ", large" : "", close ? ", close" : "");
  const EdgeCase edges = edges_of(rows, V);
  const auto numbers = [&](std::int64_t count, bool result = true) {
    return OperationCase::Argument{at::zeros({count}, at::kDouble), Kind::fixed, result};
  };
  const auto block = [](const Tensors& t) { return EdgeBlock{t[0], t[1], t[2]}; };
  const auto sums = [](const Tensors& t) { return LogitSums{t[3], t[4], t[5]}; };
  const std::vector<OperationCase::Argument> shared = {{edges.temperature, Kind::fixed},
                                                       {edges.begin, Kind::fixed},
                                                       {edges.target, Kind::fixed},
                                                       numbers(rows),
                                                       numbers(rows),
                                                       numbers(rows)};
  const at::Tensor logits = normal({rows, V}, 60, scale);
  if (close) {
    logits.sub_(6);
    logits.select(1, 0).fill_(1e-18);
    logits.select(1, V - 1).fill_(2e-18);
  }
  // A logit's exponent is off by its distance from the maximum. Where one token has all the probability, log-prob and
  // entropy are differences of logarithms that cancel: their errors are an exponent's, relative to 1.
  const double distance = 16 * scale + 16, terms = distance + root(V) * 8;
  OperationCase score{"logit_sums, raise_maximum, score_edges", sizes, shared, {}, 0, terms};
  for (int i = 0; i < 3; ++i) score.arguments.push_back(numbers(edges.edges));
  for (const std::size_t logarithm : {4, 5, 7, 8}) score.arguments[logarithm].least = 1;
  score.arguments.push_back({logits, Kind::sum});
  score.arguments.push_back({normal({rows}, 61).abs() + logits.amax(1), Kind::fixed});
  score.call = [=](const Ops& o, const Tensors& t) {
    o.logit_sums(block(t), 2, t[9], sums(t), t[6]);
    o.raise_maximum(block(t), t[10], sums(t));
    o.score_edges(block(t), t[6], sums(t), t[7], t[8]);
  };
  cases.push_back(score);
  OperationCase gradient{"logit_gradients", sizes, shared, {}, 0, terms * 4};
  for (OperationCase::Argument& sum : gradient.arguments) sum.result = false;  // they are compared above
  for (int i = 0; i < 3; ++i) gradient.arguments.push_back(numbers(edges.edges, false));
  gradient.arguments.push_back({logits, Kind::sum, true});
  gradient.arguments.push_back({normal({edges.edges}, 62), Kind::fixed});
  gradient.arguments.push_back({normal({edges.edges}, 63), Kind::fixed});
  gradient.call = [=](const Ops& o, const Tensors& t) {
    o.logit_sums(block(t), 2, t[9], sums(t), t[6]);
    o.score_edges(block(t), t[6], sums(t), t[7], t[8]);
    o.logit_gradients(block(t), 2, sums(t), t[10], t[11], t[9]);
  };
  cases.push_back(gradient);
}

// Distributions over kept sets and over the whole vocabulary: a row has none, one or three of them, and a set may have
// no token among these columns, which are those from token 2 on.
struct SetCase {
  at::Tensor temperature, begin, target, row, set_begin, set_end, column, first;
  std::int64_t edges, distributions;
};
SetCase sets_of(std::int64_t rows, std::int64_t V, bool with_empty) {
  std::vector<std::int32_t> begin{7}, target, row, set_begin, set_end, column, first;
  std::vector<double> temperature;
  const auto add = [&](std::int64_t b, std::int64_t step) {  // step 0: the whole vocabulary; -1: no column
    row.push_back(static_cast<std::int32_t>(b));
    temperature.push_back(b % 2 == 0 ? 1.0 : 0.7 + 0.1 * static_cast<double>(b));
    set_begin.push_back(static_cast<std::int32_t>(column.size()));
    for (std::int64_t v = b % 3 % V; step > 0 && v < V; v += step) column.push_back(static_cast<std::int32_t>(v));
    const auto kept = static_cast<std::int64_t>(column.size()) - set_begin.back();
    set_end.push_back(step == 0 ? -1 : static_cast<std::int32_t>(column.size()));
    for (std::int64_t e = 0; e < 2; ++e) {
      const std::int64_t at = step == 0  ? (b * 31 + e * 17) % V
                              : kept > 0 ? column[column.size() - 1 - e % kept]
                                         : V + 1;
      target.push_back(static_cast<std::int32_t>(at + 2));
    }
    begin.push_back(static_cast<std::int32_t>(7 + target.size()));
  };
  for (std::int64_t b = 0; b < rows; ++b) {
    first.push_back(static_cast<std::int32_t>(row.size()));
    if (b % 4 == 3) continue;
    add(b, b % 4 == 1 ? 3 : 0);
    if (b % 4 != 2) continue;
    add(b, 2);
    add(b, with_empty ? -1 : 5);
  }
  first.push_back(static_cast<std::int32_t>(row.size()));
  return {at::tensor(temperature, at::kDouble),
          whole_numbers(begin),
          whole_numbers(target),
          whole_numbers(row),
          whole_numbers(set_begin),
          whole_numbers(set_end),
          whole_numbers(column),
          whole_numbers(first),
          static_cast<std::int64_t>(target.size()),
          static_cast<std::int64_t>(row.size())};
}

void add_kept_cases(std::vector<OperationCase>& cases, std::int64_t rows, std::int64_t V, const LogitShape& shape) {
  const std::string sizes = text_of(rows, " x ", V, ", kept sets", shape.is_plain() ? "" : ", shaped");
  const double terms = 48 + root(V) * 8;
  for (const bool with_empty : {false, true}) {
    const SetCase sets = sets_of(rows, V, with_empty);
    const auto numbers = [&](std::int64_t count, bool result) {
      return OperationCase::Argument{at::zeros({count}, at::kDouble), Kind::fixed, result};
    };
    const auto block = [shape](const Tensors& t) {
      return EdgeBlock{t[0], t[1], t[2], shape, KeptBlock{t[3], t[4], t[5], t[6], t[7]}};
    };
    const auto sums_in = [](const Tensors& t) { return LogitSums{t[8], t[9], t[10]}; };
    std::vector<OperationCase::Argument> shared;
    for (const at::Tensor& each :
         {sets.temperature, sets.begin, sets.target, sets.row, sets.set_begin, sets.set_end, sets.column, sets.first})
      shared.push_back({each, Kind::fixed});
    const at::Tensor logits = normal({rows, V}, 67, 2);
    const std::int64_t D = sets.distributions, E = sets.edges;
    OperationCase score{
        with_empty ? "logit_sums, raise_maximum" : "logit_sums, score_edges", sizes, shared, {}, 0, terms};
    for (int i = 0; i < 3; ++i) score.arguments.push_back(numbers(D, true));
    for (int i = 0; i < 3; ++i) score.arguments.push_back(numbers(E, true));
    for (const std::size_t logarithm : {9, 10, 12, 13}) score.arguments[logarithm].least = 1;
    score.arguments.push_back({logits, Kind::sum});
    score.arguments.push_back({at::full({D}, 9.0, at::kDouble), Kind::fixed});
    score.call = [=](const Ops& o, const Tensors& t) {
      o.logit_sums(block(t), 2, t[14], sums_in(t), t[11]);
      if (with_empty) return o.raise_maximum(block(t), t[15], sums_in(t));
      o.score_edges(block(t), t[11], sums_in(t), t[12], t[13]);
    };
    cases.push_back(score);
    // The sums of all columns are given, as ranks with the other columns have found them.
    OperationCase gradient{"logit_gradients", sizes + (with_empty ? ", none here" : ""), shared, {}, 0, terms * 4};
    gradient.arguments.push_back({normal({D}, 68), Kind::fixed});
    gradient.arguments.push_back({normal({D}, 69).abs() + 6, Kind::fixed});
    gradient.arguments.push_back({normal({D}, 70).abs(), Kind::fixed});
    gradient.arguments.push_back({normal({E}, 71), Kind::fixed});
    gradient.arguments.push_back({normal({E}, 72), Kind::fixed});
    gradient.arguments.push_back({logits, Kind::sum, true});
    gradient.call = [=](const Ops& o, const Tensors& t) {
      o.logit_gradients(block(t), 2, sums_in(t), t[11], t[12], t[13]);
    };
    cases.push_back(gradient);
  }
}

// A critic's values are summed in float64 whatever the dtype: only results are rounded.
void add_value_cases(std::vector<OperationCase>& cases, std::int64_t rows, std::int64_t width) {
  const std::string sizes = text_of(rows, " x ", width);
  const OperationCase::Argument hidden{normal({rows, width}, 64)}, weight{normal({width}, 65)}, bias{normal({1}, 66)};
  cases.push_back({"value",
                   sizes,
                   {hidden, weight, bias, {normal({rows}, 67), Kind::fixed, true}},
                   [](const Ops& o, const Tensors& t) { o.value(t[0], t[1], t[2], t[3]); },
                   0,
                   static_cast<double>(width)});
  cases.push_back({"add_value_backward",
                   sizes,
                   {hidden,
                    weight,
                    {normal({rows}, 68), Kind::fixed},
                    {normal({rows, width}, 69), Kind::activation, true},
                    {normal({width}, 70), Kind::sum, true},
                    {normal({1}, 71), Kind::sum, true}},
                   [](const Ops& o, const Tensors& t) { o.add_value_backward(t[0], t[1], t[2], t[3], t[4], t[5]); },
                   1,
                   2 + static_cast<double>(rows) * root(rows)});
}

struct ExpertSize {
  std::int64_t rows, experts, chosen;
  bool renormalise;
};

// The expert of each slot: distinct in a row, the first expert in all rows, some experts in none.
std::vector<std::int32_t> choices_of(const ExpertSize& size) {
  std::vector<std::int32_t> choice;
  for (std::int64_t r = 0; r < size.rows; ++r)
    for (std::int64_t j = 0; j < size.chosen; ++j)
      choice.push_back(
          static_cast<std::int32_t>(j == 0 ? 0 : 1 + (r * r + j - 1) % std::max<std::int64_t>(size.experts - 1, 1)));
  return choice;
}

// `equal`: logits are whole numbers, so that experts of one lane and of several are as likely; backward, logits of
// experts 32 and 65 are so large that exponents are finite relative to them alone.
void add_router_cases(std::vector<OperationCase>& cases, const ExpertSize& size, bool equal = false) {
  const auto [R, E, k, renormalise] = size;
  const std::string sizes =
      text_of(R, " rows, ", k, " of ", E, " experts", renormalise ? ", renormalised" : "", equal ? ", equal ones" : "");
  OperationCase::Argument logits{normal({R, E}, 72)};
  if (equal) logits.value = at::round(logits.value);
  std::vector<std::int32_t> recorded = choices_of(size);
  for (std::int64_t r = 0; r < R; r += 2) recorded[static_cast<std::size_t>(r * k)] = -1;
  const OperationCase::Argument choice{at::zeros({R, k}, at::kInt), Kind::fixed, true},
      weight{at::zeros({R, k}, at::kDouble), Kind::sum, true};
  const double terms = 16 + static_cast<double>(E);
  for (const bool with_recorded : {false, true})
    cases.push_back({"choose_experts",
                     sizes + (with_recorded ? ", recorded" : ""),
                     {logits, {whole_numbers(recorded).view({R, k}), Kind::fixed}, choice, weight},
                     [=, renormalise = renormalise](const Ops& o, const Tensors& t) {
                       o.choose_experts(t[0], with_recorded ? t[1] : at::Tensor(), renormalise, t[2], t[3]);
                     },
                     1,
                     terms});
  if (equal) {
    logits.value = logits.value.clone();
    for (const std::int64_t e : {32, 65}) logits.value.select(1, e).fill_(200);
  }
  std::vector<std::int32_t> group;
  for (std::int64_t r = 0; r < R; ++r) group.push_back(static_cast<std::int32_t>(r % 2));
  for (const bool penalised : {false, true})
    cases.push_back({"router_backward",
                     sizes + (penalised ? ", penalties" : ""),
                     {logits,
                      {whole_numbers(choices_of(size)).view({R, k}), Kind::fixed},
                      {normal({R, k}, 73), Kind::sum},
                      {whole_numbers(group), Kind::fixed},
                      {normal({2, E}, 74), Kind::fixed},
                      {normal({2}, 75).abs(), Kind::fixed},
                      {normal({R, E}, 76), Kind::activation, true},
                      {normal({2}, 77), Kind::fixed, penalised}},
                     [=, renormalise = renormalise](const Ops& o, const Tensors& t) {
                       o.router_backward(t[0], t[1], renormalise, t[2],
                                         penalised ? RouterPenalty{t[3], t[4], t[5]} : RouterPenalty{}, t[6],
                                         penalised ? t[7] : at::Tensor());
                     },
                     1,
                     8 * terms * root(R)});
}

// Weights times their experts' factors, in place too.
void add_scale_cases(std::vector<OperationCase>& cases, const ExpertSize& size) {
  const auto [R, E, k, ignored_renormalise] = size;
  const std::string sizes = text_of(R, " rows, ", k, " of ", E, " experts");
  const OperationCase::Argument choice{whole_numbers(choices_of(size)).view({R, k}), Kind::fixed},
      scale{normal({E}, 77)}, weight{normal({R, k}, 78), Kind::sum};
  for (const bool in_place : {false, true})
    cases.push_back(
        {"scale_by_expert",
         sizes + (in_place ? ", in place" : ""),
         {{weight.value, Kind::sum, in_place}, choice, scale, {normal({R, k}, 79), Kind::sum, true}},
         [=](const Ops& o, const Tensors& t) { o.scale_by_expert(t[0], t[1], t[2], in_place ? t[0] : t[3]); },
         0,
         1});
  for (const bool trains : {true, false})
    cases.push_back({"scale_by_expert_backward",
                     sizes + (trains ? "" : ", held"),
                     {weight, choice, scale, {normal({R, k}, 80), Kind::sum, true}, {normal({E}, 81), Kind::sum, true}},
                     [=](const Ops& o, const Tensors& t) {
                       o.scale_by_expert_backward(t[0], t[1], t[2], t[3], trains ? t[4] : at::Tensor());
                     },
                     0,
                     4 + static_cast<double>(R) * root(R)});
}

// `inner`: elements between an expert's products. `behind`: elements that stand before each weight in its memory.
void add_sorted_cases(std::vector<OperationCase>& cases, const ExpertSize& size, std::int64_t width, std::int64_t inner,
                      std::int64_t behind = 0) {
  const auto [R, E, k, renormalise] = size;
  const std::string sizes =
      text_of(R, " x ", width, ", ", k, " of ", E, " experts", behind > 0 ? ", weights not aligned" : "");
  const std::int64_t S = R * k, F = inner;
  const auto indices = [](std::int64_t count) {
    return OperationCase::Argument{at::full({count}, 7, at::kInt), Kind::fixed, true};
  };
  const std::vector<OperationCase::Argument> sorted = {
      {whole_numbers(choices_of(size)).view({R, k}), Kind::fixed}, indices(E + 1), indices(S), indices(S)};
  const auto slots = [](const Tensors& t) { return SortedSlots{t[1], t[2], t[3]}; };
  cases.push_back(
      {"sort_by_expert", sizes, sorted, [=](const Ops& o, const Tensors& t) { o.sort_by_expert(t[0], slots(t)); }, 0});
  if (width == 0) return;  // the sort alone
  OperationCase add{"add_expert_rows", sizes, sorted, {}, 0, 4 + 2 * static_cast<double>(k)};
  add.arguments.push_back({normal({S, width}, 80)});
  add.arguments.push_back({normal({R, k}, 81), Kind::sum});
  add.arguments.push_back({normal({R, width}, 82), Kind::sum, true});
  add.call = [=](const Ops& o, const Tensors& t) {
    o.sort_by_expert(t[0], slots(t));
    o.add_expert_rows(slots(t), t[4], t[5], t[6]);
  };
  cases.push_back(add);
  OperationCase round{"round_sum", sizes, {}, {}, 1, 1};
  round.arguments = {{normal({R, width}, 83), Kind::activation, true},
                     {normal({R, width}, 84), Kind::sum},
                     {normal({R, width}, 85), Kind::activation, true}};
  round.call = [](const Ops& o, const Tensors& t) {
    o.round_sum(t[0], t[1], t[0]);
    o.round_sum(at::Tensor(), t[1], t[2]);
  };
  cases.push_back(round);
  round.sizes += ", the first row";
  round.call = [](const Ops& o, const Tensors& t) {
    const auto first = [&](int i) { return t[static_cast<std::size_t>(i)].narrow(0, 0, 1); };
    o.round_sum(first(0), first(1), first(0));
    o.round_sum(at::Tensor(), first(1), first(2));
  };
  cases.push_back(round);
  // Two products in a row: the sums of the second are of values rounded twice.
  const double products = 8 * root(width) * (static_cast<double>(width) + static_cast<double>(R));
  OperationCase experts{"add_experts", sizes, sorted, {}, 12, products};
  experts.arguments.push_back({normal({behind + E * 2 * F * width}, 86, 0.2)});
  experts.arguments.push_back({normal({behind + E * width * F}, 87, 0.2)});
  experts.arguments.push_back({normal({R, width}, 88)});
  experts.arguments.push_back({normal({R, k}, 89), Kind::sum});
  experts.arguments.push_back({at::zeros({S, 2 * F}, at::kDouble), Kind::activation, true});
  experts.arguments.push_back({normal({R, width}, 90), Kind::sum, true});
  experts.arguments.push_back({at::zeros({R, width}, at::kDouble)});
  experts.arguments.push_back({at::zeros({R, F}, at::kDouble)});
  const auto weights = [F, width, behind, E = size.experts](const Tensors& t) {
    const auto of = [&](const at::Tensor& flat) { return flat.narrow(0, behind, flat.size(0) - behind); };
    return ExpertWeights{of(t[4]).view({E, 2 * F, width}), of(t[5]).view({E, width, F})};
  };
  experts.call = [=](const Ops& o, const Tensors& t) {
    o.sort_by_expert(t[0], slots(t));
    o.add_experts(slots(t), weights(t), t[6], t[7], t[8], t[9], {t[10], t[11], {}, {}});
  };
  cases.push_back(experts);
  OperationCase backward = experts;
  backward.operation = "add_experts_backward";
  backward.roundings = 24;
  backward.arguments.push_back({normal({R, width}, 91)});
  backward.arguments.push_back({normal({E, 2 * F, width}, 92), Kind::sum, true});
  backward.arguments.push_back({normal({E, width, F}, 93), Kind::sum, true});
  backward.arguments.push_back({normal({R, width}, 94), Kind::sum, true});
  backward.arguments.push_back({normal({R, k}, 95), Kind::sum, true});
  backward.arguments.push_back({at::zeros({R, 2 * F}, at::kDouble)});
  backward.arguments.push_back({at::zeros({2 * F * width}, at::kDouble)});
  backward.call = [=](const Ops& o, const Tensors& t) {
    o.sort_by_expert(t[0], slots(t));
    o.add_experts(slots(t), weights(t), t[6], t[7], t[8], t[9], {t[10], t[11], {}, {}});
    o.add_experts_backward(slots(t), weights(t), t[6], t[7], t[8], t[12], {t[13], t[14]}, t[15], t[16],
                           {t[10], t[11], t[17], t[18]});
  };
  cases.push_back(backward);
  for (const bool down : {false, true}) {
    backward.sizes = experts.sizes + (down ? ", gate and up held" : ", down held");
    backward.call = [=](const Ops& o, const Tensors& t) {
      o.sort_by_expert(t[0], slots(t));
      o.add_experts(slots(t), weights(t), t[6], t[7], t[8], t[9], {t[10], t[11], {}, {}});
      o.add_experts_backward(slots(t), weights(t), t[6], t[7], t[8], t[12],
                             {down ? at::Tensor() : t[13], down ? t[14] : at::Tensor()}, t[15], t[16],
                             {t[10], t[11], t[17], t[18]});
    };
    cases.push_back(backward);
  }
}

// Logits that are few numbers, 0 and -0 among them, or that differ in the last bits of a float32 and of a float64; all
// the same; the same but for tokens 1 and 2, which are likelier; and logits of which a draw leaves a rest.
enum class Logits { random, equal, neighbours, same, pair, rest, rest_before_tie };

// Token 0 has weight 1; token 1 and the k - 1 even ones have w = 0.7 ulp, ulp = 2^-52 being that of 1; the others have
// none. Each w rounds the sum up by an ulp, to 1 + k ulp, of which a draw of 1 - 2^-53 is 1 + (k - 1) ulp; with 1 and
// each w taken off, 0.3 k - 1 ulp are left behind the last of them, in the last thread's tokens.
// Behind it, where V is even: another token without weight, likelier than the others; or another w.
at::Tensor logits_that_leave_a_rest(std::int64_t B, std::int64_t V, bool tie) {
  const double weighted = std::log(0.7 * 0x1p-52);
  const at::Tensor logits = at::full({B, V}, -1000, at::kDouble);
  logits.slice(1, 0, V, 2).fill_(weighted);
  logits.select(1, 0).fill_(0);
  logits.select(1, 1).fill_(weighted);
  if (V % 2 == 0) logits.select(1, V - 1).fill_(tie ? weighted : -999);
  return logits;
}

at::Tensor logits_of(Logits kind, std::int64_t B, std::int64_t V) {
  if (kind == Logits::neighbours) {
    const at::Tensor n = at::arange(B * V, at::kDouble).view({B, V});
    return 1 + at::remainder(n * 5, 8) * 0x1p-23 + at::remainder(n * 3, 7) * 0x1p-52;
  }
  if (kind == Logits::rest || kind == Logits::rest_before_tie)
    return logits_that_leave_a_rest(B, V, kind == Logits::rest_before_tie);
  if (kind == Logits::same || kind == Logits::pair) {
    const at::Tensor logits = at::zeros({B, V}, at::kDouble);
    if (kind == Logits::pair) logits.narrow(1, 1, 2).fill_(1);
    return logits;
  }
  const at::Tensor logits = normal({B, V}, 96, 2);
  return kind == Logits::equal ? at::round(logits) : logits;
}

void add_choice_case(std::vector<OperationCase>& cases, const std::string& name, const ChoiceRule& rule, std::int64_t V,
                     Logits kind) {
  const std::int64_t B = 3, N = 64;
  const at::Tensor logits = logits_of(kind, B, V);
  at::Tensor uniform = at::rand({N}, at::detail::createCPUGenerator(97), at::kDouble);
  // The ends, and where the weights of tokens and threads begin if all are 1.
  const bool rest = kind == Logits::rest || kind == Logits::rest_before_tie;
  const std::vector<double> ends = {0.0, rest ? 1 - 0x1p-53 : 1 - 1e-9, 0.5, 0x1p-9, 0x1p-3};
  for (std::int64_t i = 0; i < 5; ++i) uniform[i] = uniform[40 + i] = ends[static_cast<std::size_t>(i)];
  cases.push_back(
      {"choose_tokens",
       text_of(name, ", ", V, " tokens",
               kind == Logits::random  ? ""
               : kind == Logits::equal ? ", equal ones"
               : kind == Logits::same  ? ", all the same"
               : kind == Logits::pair  ? ", a likelier pair"
               : kind == Logits::rest  ? ", a rest"
               : rest                  ? ", a rest before a tie"
                                       : ", neighbours"),
       {{logits, Kind::sum},
        {whole_numbers({4, 36, 36, 68}), Kind::fixed},
        {uniform, Kind::fixed},
        {at::zeros({N}, at::kDouble), Kind::fixed, true},
        {at::zeros({N}, at::kDouble), Kind::fixed, true},
        {at::zeros({B, (V + 31) / 32}, at::kInt), Kind::fixed, rule.temperature > 0}},
       [rule](const Ops& o, const Tensors& t) { o.choose_tokens(t[0], rule, t[1], t[2], t[3], t[4], t[5]); },
       0,
       64});
}

}  // namespace

std::vector<OperationCase> head_cases() {
  std::vector<OperationCase> cases;
  add_logit_cases(cases, 1, 1, 1);
  add_logit_cases(cases, 4, 33, 2);
  add_logit_cases(cases, 3, 2056, 3);
  add_logit_cases(cases, 5, 128, 1e4);
  add_logit_cases(cases, 16, 1, 1);
  add_logit_cases(cases, 16, 9, 1);
  add_logit_cases(cases, 4, 260, 1, true);
  add_kept_cases(cases, 3, 1, {});
  add_kept_cases(cases, 7, 37, {});
  add_kept_cases(cases, 6, 1030, {});
  add_kept_cases(cases, 4, 40, {.scale = 0.5, .cap = 3});
  add_value_cases(cases, 0, 8);
  add_value_cases(cases, 1, 3);
  add_value_cases(cases, 5, 264);
  add_value_cases(cases, 70, 40);
  add_value_cases(cases, 16, 1);
  add_value_cases(cases, 16, 9);
  return cases;
}

std::vector<OperationCase> expert_cases() {
  std::vector<OperationCase> cases;
  for (const ExpertSize& size : {ExpertSize{1, 1, 1, false}, ExpertSize{5, 8, 2, true}, ExpertSize{6, 67, 4, false},
                                 ExpertSize{3, 128, 8, true}, ExpertSize{5, 70, 40, true}})
    add_router_cases(cases, size);
  add_router_cases(cases, {6, 100, 12, false}, true);
  for (const ExpertSize& size : {ExpertSize{1, 2, 1, false}, ExpertSize{90, 7, 3, false}}) add_scale_cases(cases, size);
  add_sorted_cases(cases, {1, 1, 1, false}, 4, 3);
  add_sorted_cases(cases, {7, 6, 2, true}, 24, 13);
  add_sorted_cases(cases, {140, 5, 2, true}, 10, 6);
  add_sorted_cases(cases, {3, 45, 40, false}, 8, 5);
  add_sorted_cases(cases, {16, 4, 2, false}, 9, 5);
  add_sorted_cases(cases, {2, 2, 1, false}, 530, 266);
  add_sorted_cases(cases, {0, 7, 2, false}, 0, 0);
  add_sorted_cases(cases, {1100, 128, 2, false}, 0, 0);
  // Sizes of grouped products in bfloat16, and weights that those do not take.
  add_sorted_cases(cases, {13, 5, 2, true}, 24, 16);
  add_sorted_cases(cases, {13, 5, 2, true}, 24, 16, 3);
  return cases;
}

std::vector<OperationCase> optimizer_cases() {
  std::vector<OperationCase> cases;
  for (const std::int64_t count : {0, 1, 7, 1024, 20000, 40001}) {
    // Chains of at most 1,024 additions, in double.
    cases.push_back({"sum_of_squares",
                     text_of(count),
                     {{normal({count}, 98), Kind::sum}, {normal({1}, 99), Kind::fixed, true}},
                     [](const Ops& o, const Tensors& t) { o.sum_of_squares(t[0], t[1]); },
                     0,
                     1024});
    const AdamWStep step{.lr = 1e-3, .beta1 = count % 2 == 0 ? 0.9 : 0.4, .grad_scale = 0.7, .step = 3};
    cases.push_back({"adamw",
                     text_of(count),
                     {{normal({count}, 100), Kind::sum, true},
                      {normal({count}, 101), Kind::sum},
                      {normal({count}, 102), Kind::sum, true},
                      {normal({count}, 103).abs(), Kind::sum, true}},
                     [step](const Ops& o, const Tensors& t) { o.adamw(t[0], t[1], t[2], t[3], step, at::Tensor()); },
                     0,
                     8});
    // A part of a longer tensor, whose rest stays as it is.
    const std::int64_t part = count == 1024 ? 17 : count;
    if (count <= 1024)
      cases.push_back({"adamw",
                       text_of(part, " of ", 24),
                       {{normal({24}, 104), Kind::sum, true},
                        {normal({24}, 105), Kind::sum},
                        {normal({24}, 106), Kind::sum, true},
                        {normal({24}, 107).abs(), Kind::sum, true}},
                       [step, part](const Ops& o, const Tensors& t) {
                         const auto front = [&](int i) { return t[static_cast<std::size_t>(i)].narrow(0, 0, part); };
                         o.adamw(front(0), front(1), front(2), front(3), step, at::Tensor());
                       },
                       0,
                       8});
    // Where activations are bfloat16 the parameters' copies are made with the step, elsewhere they are copied here.
    const at::Tensor every = at::arange(count, at::kInt);
    cases.push_back({"adamw",
                     text_of(count, ", rounded copy"),
                     {{normal({count}, 100), Kind::sum},
                      {normal({count}, 101), Kind::sum},
                      {normal({count}, 102), Kind::sum},
                      {normal({count}, 103).abs(), Kind::sum},
                      {at::zeros({count}, at::kDouble), Kind::activation, true},
                      {every, Kind::fixed}},
                     [step, count](const Ops& o, const Tensors& t) {
                       const bool rounds = t[4].scalar_type() == at::kBFloat16;
                       o.adamw(t[0], t[1], t[2], t[3], step, rounds ? t[4] : at::Tensor());
                       if (!rounds) o.gather(t[0].view({count, 1}), t[5], t[4].view({count, 1}));
                     },
                     1,
                     8});
  }
  for (const auto& [V, kind] :
       {std::pair{std::int64_t{1}, Logits::random}, std::pair{std::int64_t{33}, Logits::equal},
        std::pair{std::int64_t{1000}, Logits::random}, std::pair{std::int64_t{700}, Logits::equal},
        std::pair{std::int64_t{21}, Logits::neighbours}, std::pair{std::int64_t{1}, Logits::neighbours},
        std::pair{std::int64_t{257}, Logits::random}, std::pair{std::int64_t{8}, Logits::same},
        std::pair{std::int64_t{512}, Logits::same}, std::pair{std::int64_t{513}, Logits::pair}}) {
    add_choice_case(cases, "likeliest", {.temperature = 0}, V, kind);
    add_choice_case(cases, "any", {.temperature = 1.3}, V, kind);
    add_choice_case(cases, "top-1", {.temperature = 1, .top_k = 1}, V, kind);
    add_choice_case(cases, "top-k", {.temperature = 1, .top_k = 5}, V, kind);
    add_choice_case(cases, "top-p", {.temperature = 0.8, .top_p = 0.7}, V, kind);
    add_choice_case(cases, "top-k and top-p",
                    {.temperature = 1, .top_k = kind == Logits::neighbours ? 5 : 20, .top_p = 0.9}, V, kind);
    add_choice_case(cases, "half of the weight", {.temperature = 1, .top_p = 0.5}, V, kind);
    add_choice_case(cases, "half", {.temperature = 1, .top_k = V / 2 + 1}, V, kind);
  }
  // 257 and 258 tokens are two of each of 129 threads, and one or two of the last; 130 have weight.
  add_choice_case(cases, "those with weight", {.temperature = 1, .top_k = 130}, 257, Logits::rest);
  add_choice_case(cases, "one without weight", {.temperature = 1, .top_k = 131}, 258, Logits::rest);
  add_choice_case(cases, "all but the last tie", {.temperature = 1, .top_k = 130}, 258, Logits::rest_before_tie);
  return cases;
}

}  // namespace espalier
