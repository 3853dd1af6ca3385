// Cases of layers that carry a state from row to row: the gated delta rule, Mamba-2, the gates around them, and short
// convolutions.
#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "espalier/base/error.h"
#include "espalier/selftest/operation_check.h"

namespace espalier {
namespace {

using Kind = OperationCase::Kind;
using Tensors = std::vector<at::Tensor>;
using Ops = Operations;

// Rows of a run, and the run whose state it begins with: -1 for a state that is given, -2 for none.
struct RunSize {
  std::int64_t rows, after;
};

struct DeltaSize {
  RecurrenceShape shape;
  std::vector<RunSize> runs;
  std::string name;
  bool strong = false;  // logarithms of every third decay, and of all decays of every fifth row, are about -40
  bool weak = false;    // logarithms of decays are about -0.01, so that rows far apart depend on each other
};

bool forks(const std::vector<RunSize>& sizes, std::size_t run) {
  return std::ranges::any_of(sizes, [&](const RunSize& each) { return each.after == static_cast<std::int64_t>(run); });
}

// The states around runs that the caller keeps: all, or those alone that other runs of the set begin with.
enum class Kept { all, of_forks };

// States stand behind each other: the given one, then those that runs leave. Gradients likewise.
std::vector<StateRun> runs_of(const std::vector<RunSize>& sizes, Kept kept, const at::Tensor& states,
                              const at::Tensor& grads) {
  std::vector<StateRun> runs;
  std::int64_t row = 0;
  for (std::size_t r = 0; r < sizes.size(); ++r) {
    const auto [rows, after] = sizes[r];
    StateRun run{row, row + rows, {}, {}, {}, {}, forks(sizes, r)};
    const bool keeps_end = kept == Kept::all || run.forks;
    if (keeps_end) run.end_N = states[static_cast<std::int64_t>(r) + 1];
    if (after >= -1) run.start_N = states[after + 1];
    if (grads.defined()) {
      if (keeps_end) run.grad_end_N = grads[static_cast<std::int64_t>(r) + 1];
      if (after >= 0 || (after == -1 && kept == Kept::all)) run.grad_start_N = grads[after + 1];
    }
    row += rows;
    runs.push_back(run);
  }
  return runs;
}

// A state is a sum over rows of products of sums over channels, each exponent off by its size; what a row adds is at
// most its value, and what was added before decays.
void add_delta_cases(std::vector<OperationCase>& cases, const DeltaSize& size) {
  const RecurrenceShape& s = size.shape;
  std::int64_t T = 0, longest = 0;
  for (const RunSize& run : size.runs) T += run.rows, longest = std::max(longest, run.rows);
  const std::int64_t C = s.channels(), H = s.value_heads, V = s.value_width(), N = s.state(),
                     R = static_cast<std::int64_t>(size.runs.size());
  const bool bias = s.conv_bias, skip = s.mamba;
  const at::Tensor projected = normal({T, s.projected()}, 130), steps = normal({s.decays()}, 133, 0.5);
  if (size.strong) {
    projected.slice(0, 0, T, 5).narrow(1, s.columns(0).a, s.decays()).add_(40);
    steps.slice(0, 0, s.decays(), 3).add_(40);
  }
  if (size.weak) steps.sub_(5);
  const std::vector<OperationCase::Argument> shared = {{projected},
                                                       {normal({C, s.kernel}, 131, 0.5)},
                                                       {normal({H}, 132, 0.5)},
                                                       {steps},
                                                       {normal({C}, 134, 0.5)},
                                                       {normal({H}, 135)},
                                                       {normal({R + 1, N}, 136, 0.3), Kind::sum, true}};
  const auto problem = [=](const Tensors& t) {
    return DeltaRuleProblem{s, t[0], t[1], t[2], t[3], bias ? t[4] : at::Tensor(), skip ? t[5] : at::Tensor(), {}};
  };
  const double terms = 64 + 8 * static_cast<double>(s.key_dim + s.value_dim + s.kernel) * root(longest);
  const auto run_forward = [=](Kept kept, const Ops& o, const Tensors& t, const at::Tensor& out) {
    const std::vector<StateRun> runs = runs_of(size.runs, kept, t[6], {});
    DeltaRuleProblem p = problem(t);
    p.runs = runs;
    o.delta_rule(p, out);
  };
  OperationCase forward{"delta_rule", size.name, shared, {}, 1, terms};
  forward.arguments.push_back({normal({T, V}, 137), Kind::activation, true});
  for (const Kept kept : {Kept::all, Kept::of_forks}) {
    forward.sizes = size.name + (kept == Kept::all ? "" : ", last states dropped");
    forward.call = [=](const Ops& o, const Tensors& t) { run_forward(kept, o, t, t[7]); };
    cases.push_back(forward);
  }
  forward.sizes = size.name + ", states alone";
  forward.arguments.pop_back();
  forward.call = [=](const Ops& o, const Tensors& t) { run_forward(Kept::all, o, t, {}); };
  cases.push_back(forward);
  OperationCase backward{"add_delta_rule_backward", size.name, shared, {}, 1, 8 * terms * root(T)};
  backward.arguments[6].result = false;
  backward.arguments.push_back({normal({T, V}, 138)});
  backward.arguments.push_back({at::zeros({T, s.projected()}, at::kDouble), Kind::activation, true});
  for (const auto& [shape, seed] :
       {std::pair{std::vector<std::int64_t>{C, s.kernel}, 140}, std::pair{std::vector<std::int64_t>{H}, 141},
        std::pair{std::vector<std::int64_t>{s.decays()}, 142}, std::pair{std::vector<std::int64_t>{C}, 143},
        std::pair{std::vector<std::int64_t>{H}, 144}, std::pair{std::vector<std::int64_t>{R + 1, N}, 145}})
    backward.arguments.push_back(
        {normal(shape, static_cast<std::uint64_t>(seed), seed == 145 ? 0.3 : 1), Kind::sum, true});
  struct Variant {
    const char* name;
    bool held;
    Kept kept;
  };
  for (const Variant& variant : {Variant{"", false, Kept::all},
                                 {", weights held", true, Kept::all},
                                 {", gradients of states dropped", false, Kept::of_forks}}) {
    backward.sizes = size.name + variant.name;
    const bool held = variant.held;
    const Kept kept = variant.kept;
    backward.call = [=](const Ops& o, const Tensors& t) {
      run_forward(kept, o, t, {});
      const std::vector<StateRun> runs = runs_of(size.runs, kept, t[6], t[14]);
      DeltaRuleProblem p = problem(t);
      p.runs = runs;
      DeltaRuleGradients gradients{t[8], t[9], t[10], t[11], bias ? t[12] : at::Tensor(), skip ? t[13] : at::Tensor()};
      if (held) gradients = {t[8], {}, {}, {}, {}, {}};
      o.add_delta_rule_backward(p, t[7], gradients);
    };
    cases.push_back(backward);
  }
}

// A number of y is a product with a sum of K products and a bias; a weight's gradient sums over rows.
void add_short_convolution_cases(std::vector<OperationCase>& cases, const ShortConvolutionShape& s,
                                 const std::vector<RunSize>& sizes, const std::string& name) {
  std::int64_t T = 0;
  for (const RunSize& run : sizes) T += run.rows;
  const std::int64_t C = s.channels, R = static_cast<std::int64_t>(sizes.size());
  const std::vector<OperationCase::Argument> shared = {{normal({T, s.projected()}, 170)},
                                                       {normal({C, s.kernel}, 171, 0.5)},
                                                       {normal({C}, 172, 0.5)},
                                                       {normal({R + 1, s.state()}, 173, 0.3), Kind::sum, true}};
  const auto run_forward = [=](Kept kept, const Ops& o, const Tensors& t, const at::Tensor& out) {
    const std::vector<StateRun> runs = runs_of(sizes, kept, t[3], {});
    o.short_convolution({s, t[0], t[1], s.bias ? t[2] : at::Tensor(), runs}, out);
  };
  const double terms = 16 + 8 * static_cast<double>(s.kernel);
  OperationCase forward{"short_convolution", name, shared, {}, 1, terms};
  forward.arguments.push_back({normal({T, C}, 174), Kind::activation, true});
  for (const Kept kept : {Kept::all, Kept::of_forks}) {
    forward.sizes = name + (kept == Kept::all ? "" : ", last states dropped");
    forward.call = [=](const Ops& o, const Tensors& t) { run_forward(kept, o, t, t[4]); };
    cases.push_back(forward);
  }
  forward.sizes = name + ", states alone";
  forward.arguments.pop_back();
  forward.call = [=](const Ops& o, const Tensors& t) { run_forward(Kept::all, o, t, {}); };
  cases.push_back(forward);
  OperationCase backward{"add_short_convolution_backward", name, shared, {}, 1, 8 * terms * root(T)};
  backward.arguments[3].result = false;
  backward.arguments.push_back({normal({T, C}, 175)});
  backward.arguments.push_back({at::zeros({T, s.projected()}, at::kDouble), Kind::activation, true});
  backward.arguments.push_back({normal({C, s.kernel}, 176), Kind::sum, true});
  backward.arguments.push_back({normal({C}, 177), Kind::sum, true});
  backward.arguments.push_back({normal({R + 1, s.state()}, 178, 0.3), Kind::sum, true});
  struct Variant {
    const char* name;
    bool held;
    Kept kept;
  };
  for (const Variant& variant : {Variant{"", false, Kept::all},
                                 {", weights held", true, Kept::all},
                                 {", gradients of states dropped", false, Kept::of_forks}}) {
    backward.sizes = name + variant.name;
    backward.call = [=, held = variant.held, kept = variant.kept](const Ops& o, const Tensors& t) {
      run_forward(kept, o, t, {});
      const std::vector<StateRun> runs = runs_of(sizes, kept, t[3], t[8]);
      const ShortConvolutionProblem problem{s, t[0], t[1], s.bias ? t[2] : at::Tensor(), runs};
      o.add_short_convolution_backward(problem, t[4],
                                       held ? ShortConvolutionGradients{t[5], {}, {}}
                                            : ShortConvolutionGradients{t[5], t[6], s.bias ? t[7] : at::Tensor()});
    };
    cases.push_back(backward);
  }
}

void add_gate_cases(std::vector<OperationCase>& cases, const RecurrenceShape& s, std::int64_t rows,
                    const std::string& name) {
  const std::int64_t V = s.value_width();
  const std::string sizes = text_of(name, ", ", rows, " rows");
  const std::vector<OperationCase::Argument> shared = {
      {normal({rows, V}, 150)}, {normal({rows, s.projected()}, 151)}, {normal({s.mamba ? V : s.value_dim}, 152)}};
  const auto problem = [s](const Tensors& t) { return GatedNormProblem{s, 1e-6, t[0], t[1], t[2]}; };
  const double terms = 64 + 4 * static_cast<double>(V);
  OperationCase forward{"gated_norm", sizes, shared, {}, 1, terms};
  forward.arguments.push_back({normal({rows, V}, 153), Kind::activation, true});
  forward.call = [=](const Ops& o, const Tensors& t) { o.gated_norm(problem(t), t[3]); };
  cases.push_back(forward);
  OperationCase backward{"add_gated_norm_backward", sizes, shared, {}, 1, terms * root(rows * s.value_heads)};
  backward.arguments.push_back({normal({rows, V}, 154), Kind::activation, true});
  backward.arguments.push_back({normal({rows, s.projected()}, 155), Kind::activation, true});
  backward.arguments.push_back({normal({s.mamba ? V : s.value_dim}, 156), Kind::sum, true});
  backward.call = [=](const Ops& o, const Tensors& t) {
    o.add_gated_norm_backward(problem(t), t[3], t[3], t[4], t[5]);
  };
  cases.push_back(backward);
  backward.sizes += ", weight held";
  backward.call = [=](const Ops& o, const Tensors& t) {
    o.add_gated_norm_backward(problem(t), t[3], t[3], t[4], at::Tensor());
  };
  cases.push_back(backward);
}

void add_head_gate_cases(std::vector<OperationCase>& cases, std::int64_t rows, std::int64_t heads, std::int64_t D) {
  const std::string sizes = text_of(rows, " x ", heads, " heads of ", D);
  const OperationCase::Argument x{normal({rows, heads * D}, 160)}, gates{normal({rows, 2 * heads * D}, 161)};
  cases.push_back({"gate_heads",
                   sizes,
                   {x, gates, {normal({rows, heads * D}, 162), Kind::activation, true}},
                   [D](const Ops& o, const Tensors& t) { o.gate_heads(t[0], t[1], D, t[2]); },
                   1,
                   24});
  cases.push_back(
      {"gate_heads_backward",
       sizes,
       {x, gates, {normal({rows, heads * D}, 163), Kind::activation, true}, {gates.value, Kind::activation, true}},
       [D](const Ops& o, const Tensors& t) { o.gate_heads_backward(t[0], t[1], D, t[2], t[2], t[3]); },
       1,
       48});
}

}  // namespace

std::vector<OperationCase> state_cases() {
  std::vector<OperationCase> cases;
  const RecurrenceShape by_part{.key_heads = 2, .value_heads = 4, .key_dim = 8, .value_dim = 5, .kernel = 4};
  RecurrenceShape by_head = by_part, wide = by_part, mamba = by_part;
  by_head.by_key_head = true;
  wide.key_heads = wide.value_heads = 1, wide.key_dim = 20, wide.value_dim = 64, wide.kernel = 2;
  RecurrenceShape wider = wide, narrow = wide;
  wider.value_dim = 66, narrow.value_dim = 12;  // three blocks of 32 value channels; one
  mamba.mamba = mamba.conv_bias = true, mamba.value_dim = 6, mamba.kernel = 3, mamba.least_step = 0.3,
  mamba.largest_step = 1.5;
  RecurrenceShape large = by_head;
  large.key_heads = 1, large.value_heads = 2, large.key_dim = 100, large.value_dim = 40;
  RecurrenceShape of_channels = by_part, wide_channels = wide;
  of_channels.value_heads = 2, of_channels.gate_latent = wide_channels.gate_latent = 1, wide_channels.value_dim = 33;
  RecurrenceShape strong_channels = wide_channels, large_channels = wide_channels;
  RecurrenceShape narrow_channels = narrow;
  narrow_channels.gate_latent = 1;
  RecurrenceShape few_channels = narrow_channels, above_64 = narrow;
  few_channels.key_dim = 2, few_channels.value_dim = 3, above_64.key_dim = 65, above_64.value_dim = 7;
  strong_channels.key_dim = 64, strong_channels.value_dim = 20;
  large_channels.key_dim = 128, large_channels.value_dim = 64;
  RecurrenceShape bare = mamba;
  bare.conv_bias = false, bare.least_step = 0, bare.largest_step = std::numeric_limits<double>::infinity();
  // A tree: a run of more than two blocks, branches behind it, one of them shorter than the convolution.
  const std::vector<RunSize> tree = {{130, -1}, {17, 0}, {2, 0}, {5, 2}, {1, -2}}, small = {{3, -2}, {33, 0}};
  add_delta_cases(cases, {by_part, tree, "q, k, v of all heads, a tree"});
  add_delta_cases(cases, {by_head, small, "by key head"});
  add_delta_cases(cases, {wide, {{70, -1}}, "heads of 20 and 64"});
  add_delta_cases(cases, {wider, {{17, -1}}, "heads of 20 and 66"});
  add_delta_cases(cases,
                  {.shape = narrow, .runs = {{64, -1}}, .name = "weak decays, heads of 20 and 12", .weak = true});
  add_delta_cases(cases, {large, {{66, -1}, {3, 0}}, "heads of 100 and 40"});
  add_delta_cases(cases, {mamba, tree, "Mamba-2, a tree"});
  add_delta_cases(cases, {bare, small, "Mamba-2 without biases"});
  add_delta_cases(cases, {of_channels, tree, "decays of channels, a tree"});
  add_delta_cases(cases, {wide_channels, {{70, -1}}, "decays of channels, heads of 20 and 33"});
  add_delta_cases(cases, {strong_channels, {{70, -1}, {40, 0}}, "strong decays of channels, heads of 64 and 20", true});
  add_delta_cases(cases, {large_channels, {{67, -1}, {3, 0}}, "decays of channels, heads of 128 and 64"});
  add_delta_cases(cases, {.shape = narrow_channels,
                          .runs = {{64, -1}},
                          .name = "weak decays of channels, heads of 20 and 12",
                          .weak = true});
  add_delta_cases(cases, {few_channels, {{17, -1}}, "decays of channels, heads of 2 and 3"});
  add_delta_cases(cases, {above_64, {{17, -1}}, "heads of 65 and 7"});
  add_short_convolution_cases(cases, {.channels = 40, .kernel = 4, .bias = true}, tree, "a tree");
  add_short_convolution_cases(cases, {.channels = 130, .kernel = 3}, {{3, -2}, {33, 0}}, "without biases");
  add_gate_cases(cases, by_part, 7, "q, k, v of all heads");
  add_gate_cases(cases, by_head, 300, "by key head");
  add_gate_cases(cases, mamba, 9, "Mamba-2");
  add_gate_cases(cases, of_channels, 11, "decays of channels");
  add_head_gate_cases(cases, 5, 3, 24);
  add_head_gate_cases(cases, 1, 1, 7);
  return cases;
}

}  // namespace espalier
