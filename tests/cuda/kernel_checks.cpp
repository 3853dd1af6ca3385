#include "tests/cuda/kernel_checks.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/lerp.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <utility>

#include "espalier/base/error.h"
#include "espalier/mixers/attention/wide_work.h"
#include "espalier/ops/cuda/attention.h"
#include "espalier/selftest/operation_check.h"
#include "tests/cuda/emulated_runtime.h"
#include "tests/cuda/emulation.h"

namespace espalier::testing {
namespace {

using Kind = KernelCheck::Kind;
using Tensors = std::vector<at::Tensor>;

Tensors results_in_order(const OperationCase& each, DType dtype, unsigned seed) {
  emulation::set_seed(seed);
  return results_on(emulated_device(), each, dtype);
}

std::string answer_problem(const OperationCase& each, DType dtype, Tensors& answer) {
  if (answer.empty()) answer = answer_of_cpu(each, dtype);
  const OperationCheck check = compared(each, dtype, results_in_order(each, dtype, 1), answer);
  return check.pass() ? "" : text_of("off by ", check.error, ", allowed ", check.allowed);
}

std::string orders_problem(const OperationCase& each, DType dtype) {
  const Tensors forward = results_in_order(each, dtype, 0);
  for (const unsigned seed : {1u, 2u})
    if (!same_bits(forward, results_in_order(each, dtype, seed))) return text_of("other bits with seed ", seed);
  return "";
}

void add_operations(std::vector<KernelCheck>& checks, const std::string& group, std::vector<OperationCase> cases) {
  for (OperationCase& moved : cases) {
    const auto each = std::make_shared<const OperationCase>(std::move(moved));
    for (const DType dtype : {DType::float64, DType::float32, DType::bfloat16}) {
      const std::string name = text_of(each->operation, ", ", each->sizes, ", ", name_of(dtype));
      const auto answer = std::make_shared<Tensors>();
      checks.push_back({Kind::answer, group, name, [=] { return answer_problem(*each, dtype, *answer); }});
      if (dtype != DType::float64)
        checks.push_back({Kind::orders, group, name, [=] { return orders_problem(*each, dtype); }});
    }
  }
}

// Products of [m, k] and [k, n] on tensor cores: a matrix instruction for every 16 x 8 x 16.
std::int64_t instructions(std::int64_t products, std::int64_t m, std::int64_t n, std::int64_t k) {
  return products * m * n * k / (16 * 8 * 16);
}

std::string counted(const char* what, std::int64_t wanted) {
  const std::int64_t got = emulation::counter(what);
  return got == wanted ? "" : text_of(what, ": ", got, " instead of ", wanted, ". ");
}

at::Tensor random_rows(std::int64_t count, std::int64_t width) {
  return emulated_device().adopt(normal({count, width}, 1).to(at::kBFloat16));
}

std::string dense_instructions(std::int64_t D) {
  constexpr std::int64_t T = 64, P = 128, H = 2, J = 1;
  const auto sums = [D](std::int64_t count) { return emulated_device().adopt(at::zeros({count, J * D}, at::kFloat)); };
  const at::Tensor ends = emulated_device().adopt(at::full({T}, T, at::kInt));
  const AttentionProblem problem{D,
                                 random_rows(T, H * D),
                                 random_rows(T, J * D),
                                 random_rows(T, J * D),
                                 random_rows(P, J * D),
                                 random_rows(P, J * D),
                                 at::Tensor(),
                                 ends};
  const at::Tensor out = random_rows(T, H * D), lse = emulated_device().adopt(at::zeros({H, T}, at::kFloat));
  const Operations& ops = emulated_device().operations();
  emulation::set_seed(1);
  emulation::reset_counters();
  ops.attention(problem, out, lse);
  emulated_device().synchronize();
  std::string problems = counted("mma", H * instructions(2, T, P + T, D)) + counted("bank conflicts", 0);
  emulation::reset_counters();
  ops.add_attention_backward(problem, out, lse, random_rows(T, H * D),
                             {random_rows(T, H * D), sums(T), sums(T), sums(P), sums(P)});
  emulated_device().synchronize();
  // S and dP twice, dV, dK, dQ.
  problems += counted("mma", H * instructions(7, T, P + T, D)) + counted("bank conflicts", 0);
  return emulation::counter("ldmatrix") > 0 ? problems : "nothing is loaded by ldmatrix";
}

// A group of three: each own tile of the second and third is seen by no row of the others, and left out.
std::string instructions_of_a_group() {
  constexpr std::int64_t N = 3, T = N * 64, D = 64;
  std::vector<std::int32_t> ends;
  for (std::int64_t i = 0; i < T; ++i) ends.push_back(static_cast<std::int32_t>((i / 64 + 1) * 64));
  const auto rows = [] { return random_rows(T, D); };
  const auto sums = [](std::int64_t count) { return emulated_device().adopt(at::zeros({count, D}, at::kFloat)); };
  const at::Tensor none = rows().narrow(0, 0, 0), lse = emulated_device().adopt(at::zeros({1, T}, at::kFloat));
  const AttentionProblem problem{D,    rows(), rows(),       rows(),
                                 none, none,   at::Tensor(), emulated_device().adopt(whole_numbers(ends))};
  const Operations& ops = emulated_device().operations();
  const at::Tensor out = rows();
  emulation::set_seed(1);
  emulation::reset_counters();
  ops.attention(problem, out, lse);
  emulated_device().synchronize();
  const std::string problems = counted("mma", instructions(2, 64, 64, D) * N);
  emulation::reset_counters();
  ops.add_attention_backward(problem, out, lse, rows(), {rows(), sums(T), sums(T), sums(0), sums(0)});
  emulated_device().synchronize();
  return problems + counted("mma", instructions(7, 64, 64, D) * N);
}

// Branches of 64 rows below a path of 512 rows, and a window of 32: of the path each branch meets the last 64 keys in
// the forward, the last 32 in the backward of queries, and with its first 32 queries the last 64 in that of keys.
std::string instructions_of_a_window() {
  constexpr std::int64_t N = 2, T = N * 64, P = 512, D = 64, kWindow = 32;
  std::vector<std::int32_t> ends, depths;
  for (std::int64_t i = 0; i < T; ++i) {
    ends.push_back(static_cast<std::int32_t>((i / 64 + 1) * 64));
    depths.push_back(static_cast<std::int32_t>(P + i % 64));
  }
  const auto sums = [](std::int64_t count) { return emulated_device().adopt(at::zeros({count, D}, at::kFloat)); };
  const at::Tensor lse = emulated_device().adopt(at::zeros({1, T}, at::kFloat)), out = random_rows(T, D);
  const AttentionProblem problem{D,
                                 random_rows(T, D),
                                 random_rows(T, D),
                                 random_rows(T, D),
                                 random_rows(P, D),
                                 random_rows(P, D),
                                 at::Tensor(),
                                 emulated_device().adopt(whole_numbers(ends)),
                                 kWindow,
                                 emulated_device().adopt(whole_numbers(depths))};
  const Operations& ops = emulated_device().operations();
  emulation::set_seed(1);
  emulation::reset_counters();
  ops.attention(problem, out, lse);
  emulated_device().synchronize();
  const std::string problems = counted("mma", N * instructions(2, 64, 64 + 64, D));
  emulation::reset_counters();
  ops.add_attention_backward(problem, out, lse, random_rows(T, D),
                             {random_rows(T, D), sums(T), sums(T), sums(P), sums(P)});
  emulated_device().synchronize();
  return problems + counted("mma", N * (instructions(3, 64, 32 + 64, D) + instructions(4, 32, 64, D) +
                                        instructions(4, 64, 64, D)));
}

// Heads of five sizes. A grid's second dimension ends at 65,535, and a head may take two of it; tiles are read 16 bytes
// at a time. A block's tiles take 512 bytes for each element of a head, and 512 for the numbers of queries: 128.5 KiB
// for 256, 96.5 KiB for 192. The largest product has the largest score if the scale is positive.
std::string problem_of_what_tiles_take() {
  alignas(16) static const bfloat16 rows[16] = {};
  const auto takes = [](std::int64_t head_dim, std::int64_t heads = 1, std::int64_t first = 0, std::int64_t stride = 64,
                        double scale = 1) {
    const attention::Rows<const bfloat16> whole{rows, 64}, q{rows + first, stride};
    attention::Shape shape{};
    shape.heads = heads, shape.head_dim = head_dim, shape.scale = scale;
    return cuda::takes_tiles(shape, {q, whole, whole, whole, whole});
  };
  for (std::int64_t D = 1; D <= 257; ++D)
    if (takes(D) != (D == 64 || D == 96 || D == 128 || D == 192 || D == 256)) return text_of("heads of ", D);
  const emulation::Architecture usual = emulation::architecture();
  for (const emulation::Architecture& architecture : emulation::kArchitectures) {
    emulation::set_architecture(architecture);
    for (const std::int64_t D : {64, 96, 128, 192, 256})
      if (takes(D) != (512 * D + 512 <= static_cast<std::int64_t>(architecture.shared_bytes)))
        return text_of("heads of ", D, " on ", architecture.name);
  }
  emulation::set_architecture(usual);
  if (!takes(64, 32767)) return "the most heads that a grid has are not taken";
  if (takes(64, 32768)) return "more heads are taken than a grid has";
  if (takes(64, 1, 1)) return "rows that begin between pieces are taken";
  for (const double scale : {0.0, -1.0})
    if (takes(64, 1, 0, 64, scale)) return text_of("a scale of ", scale, " is taken");
  if (takes(64, 1, 0, 68)) return "rows that end between pieces are taken";
  return "";
}

// Two results as one, against ATen in float64: row 0 sees no keys in the first part, row 1 none in the second, row 2
// none at all. Beside each row of results is room that belongs to nobody: the number of elements of it decides how many
// are read at a time. The sum may be the first part's own memory, which makes no difference.
template <class First, class Second, class Out>
std::string problem_of_merging(std::int64_t rows, std::int64_t heads, std::int64_t head_dim, std::int64_t beside) {
  using A = accumulator_t<Out>;
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const auto type = []<class T>(T) {
    return std::is_same_v<T, bfloat16> ? at::kBFloat16 : std::is_same_v<T, float> ? at::kFloat : at::kDouble;
  };
  const auto values = [&](std::uint64_t seed, at::ScalarType dtype) {
    return normal({rows, heads * head_dim + beside}, seed).to(dtype);
  };
  const at::Tensor first = values(1, type(First{})), second = values(2, type(Second{})),
                   first_lse = normal({heads, rows}, 3).to(type(A{})),
                   second_lse = normal({rows, heads}, 4).to(type(A{}));
  first_lse.select(1, 0).fill_(kInfinity), first.select(0, 0).fill_(std::numeric_limits<double>::quiet_NaN());
  second_lse.select(0, 1).fill_(-kInfinity);
  first_lse.select(1, 2).fill_(-kInfinity), second_lse.select(0, 2).fill_(kInfinity);
  const auto seen = [&](const at::Tensor& lse) { return lse.to(at::kDouble).masked_fill(lse.isinf(), -kInfinity); };
  const at::Tensor wanted_lse = at::logaddexp(seen(first_lse), seen(second_lse).t());
  const auto part = [&](const at::Tensor& of, const at::Tensor& lse) {
    const at::Tensor weight = (lse - wanted_lse).exp().nan_to_num(0).t().unsqueeze(-1);
    return of.to(at::kDouble).narrow(1, 0, heads * head_dim).view({rows, heads, head_dim}).nan_to_num(0) * weight;
  };
  const at::Tensor wanted = part(first, seen(first_lse)) + part(second, seen(second_lse).t());
  const bool in_place = std::is_same_v<First, Out>;
  Device& device = emulated_device();
  const at::Tensor on_device[] = {device.adopt(first.clone()), device.adopt(second), device.adopt(first_lse.clone()),
                                  device.adopt(second_lse)};
  const at::Tensor out = in_place ? on_device[0] : device.adopt(values(5, type(Out{}))),
                   lse = in_place ? on_device[2] : device.adopt(at::zeros_like(first_lse));
  const auto room = [&]<class T>(T, const at::Tensor& of) {
    return attention::Rows<T>{static_cast<T*>(of.data_ptr()), of.stride(0)};
  };
  const auto sums = [](const at::Tensor& of) { return static_cast<A*>(of.data_ptr()); };
  emulation::set_seed(1);
  cuda::merge_attention<First, Second, Out>(
      rows, heads, head_dim, {room(First{}, on_device[0]), sums(on_device[2]), rows, 1},
      {room(Second{}, on_device[1]), sums(on_device[3]), 1, heads}, {room(Out{}, out), sums(lse), rows, 1});
  const at::Tensor got = device.to_host(out), got_lse = device.to_host(lse);
  // Two exponentials, two products and their sum, and the rounding of the result; a logarithm and an exponential.
  const double unit = std::is_same_v<A, float> ? 0x1p-24 : 0x1p-53;
  const double of_out = std::is_same_v<Out, bfloat16> ? 0x1p-8 : 0;
  const at::Tensor error =
      (got.to(at::kDouble).narrow(1, 0, heads * head_dim).view({rows, heads, head_dim}) - wanted).abs();
  const at::Tensor size = part(first, seen(first_lse)).abs() + part(second, seen(second_lse).t()).abs();
  if (!(error <= size * (16 * unit + of_out)).all().item<bool>()) return text_of("off by ", error.max().item<double>());
  const at::Tensor sum_error = (got_lse.to(at::kDouble) - wanted_lse).abs();
  for (std::int64_t row = 0; row < rows; ++row)
    if (row != 2 && !(sum_error.select(1, row) <= 16 * unit).all().item<bool>())
      return text_of("other sums in row ", row);
  if (!(got_lse.select(1, 2) == -kInfinity).all().item<bool>()) return "a row that sees nothing has a sum";
  const auto beside_of = [&](const at::Tensor& of) { return of.narrow(1, heads * head_dim, beside).contiguous(); };
  if (beside > 0 && in_place && !same_bits({beside_of(got).nan_to_num(0)}, {beside_of(first).nan_to_num(0)}))
    return "memory beside the rows was written";
  return "";
}

std::string problem_of_merging_everywhere() {
  for (const std::int64_t head_dim : {8, 128, 132, 200})
    for (const std::int64_t beside : {0, 8, 3, 1}) {
      const auto told = [&](const std::string& problem) {
        return problem.empty() ? "" : text_of("heads of ", head_dim, ", ", beside, " elements beside: ", problem);
      };
      for (const std::string& problem : {problem_of_merging<float, float, float>(5, 3, head_dim, beside),
                                         problem_of_merging<double, double, double>(5, 3, head_dim, beside),
                                         problem_of_merging<bfloat16, bfloat16, bfloat16>(5, 3, head_dim, beside),
                                         problem_of_merging<bfloat16, bfloat16, float>(5, 3, head_dim, beside),
                                         problem_of_merging<float, bfloat16, float>(5, 3, head_dim, beside)})
        if (!problem.empty()) return told(problem);
    }
  return "";
}

// Where beta1 is one half, torch's lerp starts from the gradient. The difference of 1 + 2^-23 and -1 is rounded to 2,
// so that this end gives 2^-23 and the other one 0.
std::string problem_of_one_half() {
  const auto one = [](double value) { return emulated_device().adopt(at::full({1}, value, at::kFloat)); };
  const at::Tensor p = one(0), grad = one(1 + 0x1p-23), m = one(-1), v = one(0);
  const at::Tensor wanted = at::lerp(at::full({1}, -1, at::kFloat), at::full({1}, 1 + 0x1p-23, at::kFloat), 0.5);
  emulation::set_seed(1);
  emulated_device().operations().adamw(p, grad, m, v, {.lr = 1e-3, .beta1 = 0.5, .step = 1}, at::Tensor());
  const at::Tensor got = emulated_device().to_host(m);
  return got.equal(wanted) ? "" : text_of(got.item<float>(), " instead of ", wanted.item<float>());
}

// Cases of wide heads, in rooms of so few bytes that queries run in several blocks.
std::vector<OperationCase> wide_cases_in_blocks() {
  std::vector<OperationCase> cases;
  for (OperationCase& each : attention_cases()) {
    const bool wide =
        std::ranges::any_of(std::array{" heads of 264", "values of 320", " heads of 512"},
                            [&](const char* words) { return each.sizes.find(words) != std::string::npos; });
    if (!wide) continue;
    each.sizes += ", in blocks";
    each.call = [call = each.call](const Operations& operations, const std::vector<at::Tensor>& tensors) {
      const std::int64_t usual = std::exchange(WideRoom::most_bytes, 16 << 10);
      call(operations, tensors);
      WideRoom::most_bytes = usual;
    };
    cases.push_back(std::move(each));
  }
  return cases;
}

}  // namespace

std::vector<KernelCheck> kernel_checks() {
  std::vector<KernelCheck> checks;
  add_operations(checks, "Rows", row_cases());
  add_operations(checks, "Moving", moving_cases());
  add_operations(checks, "Products", product_cases());
  add_operations(checks, "Attention", attention_cases());
  add_operations(checks, "Attention", wide_cases_in_blocks());
  add_operations(checks, "Head", head_cases());
  add_operations(checks, "Experts", expert_cases());
  add_operations(checks, "Optimizer", optimizer_cases());
  add_operations(checks, "States", state_cases());
  add_operations(checks, "Variants", variant_cases());
  add_chunk_checks(checks);
  checks.push_back({Kind::answer, "Attention", "what tiles take", problem_of_what_tiles_take});
  checks.push_back({Kind::answer, "Merging", "results of two calls", problem_of_merging_everywhere});
  checks.push_back({Kind::answer, "Optimizer", "adamw, beta1 of one half", problem_of_one_half});
  for (const std::int64_t D : {64, 96})
    checks.push_back({Kind::instructions, "Formula",
                      text_of("as many as the formula has, and no bank twice, heads of ", D),
                      [D] { return dense_instructions(D); }});
  checks.push_back({Kind::instructions, "Unseen", "no tile that nobody sees", instructions_of_a_group});
  checks.push_back({Kind::instructions, "Unseen", "no tile outside of the window", instructions_of_a_window});
  return checks;
}

}  // namespace espalier::testing
