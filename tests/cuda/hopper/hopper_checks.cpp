#include "tests/cuda/hopper/hopper_checks.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <array>
#include <memory>

#include "espalier/base/error.h"
#include "espalier/ops/cuda/hopper/attention.h"
#include "espalier/selftest/operation_check.h"
#include "tests/cuda/emulated_runtime.h"
#include "tests/cuda/emulation.h"

namespace espalier::testing {
namespace {

using Kind = KernelCheck::Kind;
using Tensors = std::vector<at::Tensor>;

constexpr const char *kBackward = "add_attention_backward", *kOfLaunches = "70 rows, path 300, 4/2 heads of 128";
constexpr std::size_t kFirstResult = 8;  // of the arguments of the backward

Tensors results_in_order(const OperationCase& each, unsigned seed) {
  emulation::set_seed(seed);
  return results_on(emulated_hopper_device(), each, DType::bfloat16);
}

// Gradients of keys that no query sees stay as they were, bit by bit: those whose values' gradients the CPU leaves
// alone.
std::string problem_of_unseen_keys(const OperationCase& each, const Tensors& results, const Tensors& answer) {
  if (each.operation != kBackward) return "";
  for (const std::size_t k : {1, 3}) {  // results: gradients of queries, of own keys and values, of the path's
    const auto before = [&](std::size_t result) {
      return each.arguments[result + kFirstResult].value.to(at::kFloat).to(at::kDouble);
    };
    const at::Tensor unseen = (answer[k + 1] == before(k + 1)).all(1);
    for (const std::size_t result : {k, k + 1})
      if ((results[result] != before(result)).any(1).logical_and(unseen).any().item<bool>())
        return "gradients change of a key that no query sees";
  }
  return "";
}

std::string answer_problem(const OperationCase& each, Tensors& answer) {
  if (answer.empty()) answer = answer_of_cpu(each, DType::bfloat16);
  const Tensors results = results_in_order(each, 1);
  const OperationCheck check = compared(each, DType::bfloat16, results, answer);
  return check.pass() ? problem_of_unseen_keys(each, results, answer)
                      : text_of("off by ", check.error, ", allowed ", check.allowed);
}
std::string orders_problem(const OperationCase& each) {
  const Tensors forward = results_in_order(each, 0);
  for (const unsigned seed : {1u, 2u})
    if (!same_bits(forward, results_in_order(each, seed))) return text_of("other bits with seed ", seed);
  return "";
}

// A limit of blocks that take turns at a time, while it lives.
class BlocksTogether {
 public:
  explicit BlocksTogether(std::int64_t most) { cuda::hopper::set_blocks_together(most); }
  ~BlocksTogether() { cuda::hopper::set_blocks_together(cuda::hopper::kBlocksTogether); }
  BlocksTogether(const BlocksTogether&) = delete;
  BlocksTogether& operator=(const BlocksTogether&) = delete;
};

// The path's blocks of keys in several launches, whose turns follow each other: the CPU's answer, and the same bits in
// two orders of threads.
std::string problem_of_launches(const OperationCase& each, Tensors& answer) {
  if (answer.empty()) answer = answer_of_cpu(each, DType::bfloat16);
  for (const std::int64_t most :
       {5, 2}) {  // of two key/value heads: launches of two blocks and of one, and of one each
    const BlocksTogether limit(most);
    const Tensors results = results_in_order(each, 1);
    const OperationCheck check = compared(each, DType::bfloat16, results, answer);
    if (!check.pass()) return text_of(most, " blocks at a time: off by ", check.error, ", allowed ", check.allowed);
    if (most == 5 && !same_bits(results, results_in_order(each, 2))) return "other bits with another seed";
  }
  return "";
}

// ---- who adds in turn ----

// Own rows in a chain below a path, heads of 128, all rows of which are queries.
struct Turns {
  std::int64_t rows, path, heads, kv_heads, most;  // blocks at a time
  std::int64_t added;                              // tiles of queries that blocks add to; 0: no block adds in turn
  std::int64_t window = 0;
  double cap = 0;
};

std::string problem_of_turns(const Turns& of) {
  constexpr std::int64_t D = 128;
  Device& device = emulated_hopper_device();
  const auto rows = [&](std::int64_t count, std::int64_t heads) {
    return device.adopt(normal({count, heads * D}, 1).to(at::kBFloat16));
  };
  const auto sums = [&](std::int64_t count) { return device.adopt(at::zeros({count, of.kv_heads * D}, at::kFloat)); };
  std::vector<std::int32_t> depths;
  for (std::int64_t i = 0; i < of.rows; ++i) depths.push_back(static_cast<std::int32_t>(of.path + i));
  const std::vector<std::int32_t> ends(depths.size(), static_cast<std::int32_t>(of.rows));
  const at::Tensor q = rows(of.rows, of.heads), k = rows(of.rows, of.kv_heads), path_k = rows(of.path, of.kv_heads),
                   lse = device.adopt(at::zeros({of.heads, of.rows}, at::kFloat)),
                   depth = of.window > 0 ? device.adopt(whole_numbers(depths)) : at::Tensor();
  const AttentionProblem problem{
      D, q, k, k, path_k, path_k, at::Tensor(), device.adopt(whole_numbers(ends)), of.window, depth, 0, of.cap};
  const BlocksTogether limit(of.most);
  emulation::set_seed(1);
  emulation::reset_counters();
  device.operations().add_attention_backward(
      problem, q, lse, q, {rows(of.rows, of.heads), sums(of.rows), sums(of.rows), sums(of.path), sums(of.path)});
  device.synchronize();
  const std::int64_t added = emulation::counter("sums in bulk");
  return added == of.added ? "" : text_of(added, " tiles are added to in turn instead of ", of.added);
}

// ---- scores far below 0 ----

// All scores are about -180. A key behind the path's last one has the score 0: were it seen, its weight would be
// infinite and gradients of queries not be numbers.
std::string problem_of_low_scores() {
  constexpr std::int64_t D = 128, kRows = 20;
  Device& device = emulated_hopper_device();
  const auto rows = [&](std::int64_t count) { return device.adopt(normal({count, D}, 1).to(at::kBFloat16)); };
  const auto all = [&](std::int64_t count, double x) { return device.adopt(at::full({count, D}, x, at::kBFloat16)); };
  const auto sums = [&](std::int64_t count) { return device.adopt(at::zeros({count, D}, at::kFloat)); };
  const std::vector<std::int32_t> ends(kRows, kRows);
  for (const std::int64_t path : {126, 127}) {
    const at::Tensor q = all(kRows, -4), v = rows(kRows), out = rows(kRows), grad_q = rows(kRows),
                     lse = device.adopt(at::zeros({1, kRows}, at::kFloat));
    const AttentionProblem problem{
        D, q, all(kRows, 4), v, all(path, 4), rows(path), at::Tensor(), device.adopt(whole_numbers(ends))};
    emulation::set_seed(1);
    device.operations().attention(problem, out, lse);
    device.operations().add_attention_backward(problem, out, lse, v,
                                               {grad_q, sums(kRows), sums(kRows), sums(path), sums(path)});
    if (!device.to_host(grad_q).isfinite().all().item<bool>())
      return text_of("path ", path, ": gradients of queries that are not finite");
  }
  return "";
}

// ---- problems that are taken ----

// The kernels take problems with whole tiles of heads, a positive scale and rows that the copy engine reads.
std::string problem_of_taken() {
  using OfRows = attention::Rows<const bfloat16>;
  alignas(16) static const bfloat16 numbers[16] = {};
  const OfRows whole{numbers, 64};
  std::array<OfRows, 7> rows;  // of q, own and the path's k and v; of the result or q's gradient, the result's gradient
  rows.fill(whole);
  attention::Shape shape{};
  shape.heads = shape.kv_heads = 1;
  const auto differs = [&](std::int64_t D, std::int64_t V, bool forward, bool backward) {
    shape.head_dim = D, shape.value_dim = V;
    const attention::Inputs<bfloat16> in{rows[0], rows[1], rows[2], rows[3], rows[4]};
    return cuda::hopper::takes_forward(shape, in, rows[5]) != forward ||
           cuda::hopper::takes_backward(shape, in, rows[6], rows[5]) != backward;
  };
  for (std::int64_t D = 1; D <= 257; ++D) {
    const bool taken = D == 64 || D == 96 || D == 128 || D == 192 || D == 256, of_192 = D == 192 || D == 128;
    if (differs(D, D, taken, taken) || differs(192, D, of_192, of_192)) return text_of("heads or values of ", D);
    if (D != 128 && D != 192 && differs(D, 128, false, false)) return text_of("heads of ", D, " with values of 128");
  }
  for (std::size_t i = 0; i < rows.size(); ++i)
    for (const OfRows& other : {OfRows{numbers + 1, 64}, OfRows{numbers, 68}}) {
      rows[i] = other;
      if (differs(64, 64, i == 6, false)) return text_of("rows number ", i, " are not at multiples of 16 bytes");
      rows[i] = whole;
    }
  for (const double scale : {-1.0, 0.0, 0.5, 2.0}) {
    shape.scale = scale;
    if (differs(64, 64, scale > 0, scale > 0)) return text_of("a scale of ", scale);
  }
  for (const std::int64_t heads : {65535, 65536}) {
    shape.heads = heads;
    if (differs(64, 64, heads == 65535, heads == 65535)) return text_of(heads, " heads");
  }
  shape.heads = 1, shape.window = 5, shape.soft_cap = 2;
  return differs(128, 128, true, true) ? "windows and caps" : "";
}

// Heads that these kernels multiply.
bool is_taken(const OperationCase& each) {
  if (each.operation.find("attention") == std::string::npos) return false;
  for (const char* heads : {" heads of 64", " heads of 96", " heads of 128", " heads of 192", " heads of 256"})
    if (each.sizes.find(heads) != std::string::npos) return true;
  return false;
}

// ---- tiles that are multiplied ----

// Own rows in branches of equal length below a path, one head; all of them are queries.
struct Branches {
  std::int64_t path, branch, count, window = 0, head_dim = 64;

  std::int64_t rows() const { return branch * count; }
  std::int64_t depth(std::int64_t row) const { return path + row % branch; }
  bool sees_path(std::int64_t row, std::int64_t key) const { return window == 0 || key > depth(row) - window; }
  bool sees_own(std::int64_t row, std::int64_t key) const {
    return key <= row && key / branch == row / branch && (window == 0 || depth(key) > depth(row) - window);
  }
  // Pairs of a tile of queries and a tile of keys with a visible pair of rows.
  std::int64_t tiles(std::int64_t queries, std::int64_t keys, bool of_path, bool of_own) const {
    std::int64_t found = 0;
    const auto seen = [&](std::int64_t query, std::int64_t key, std::int64_t most, auto sees) {
      for (std::int64_t q = query; q < std::min(query + queries, rows()); ++q)
        for (std::int64_t k = key; k < std::min(key + keys, most); ++k)
          if (sees(q, k)) return 1;
      return 0;
    };
    for (std::int64_t query = 0; query < rows(); query += queries) {
      for (std::int64_t key = 0; of_path && key < path; key += keys)
        found += seen(query, key, path, [&](auto q, auto k) { return sees_path(q, k); });
      for (std::int64_t key = 0; of_own && key < rows(); key += keys)
        found += seen(query, key, rows(), [&](auto q, auto k) { return sees_own(q, k); });
    }
    return found;
  }
};

std::string counted(const char* what, std::int64_t wanted) {
  const std::int64_t got = emulation::counter("wgmma");
  return got == wanted ? "" : text_of(what, ": ", got, " products instead of ", wanted, ". ");
}

// Products have 16 of the inner dimension and 64 rows: both groups of a block multiply each tile.
std::string problem_of_tiles(const Branches& of) {
  const std::int64_t D = of.head_dim, steps = D / 16, T = of.rows(), P = of.path;
  const bool rules = of.window > 0, small = D == 64;
  const std::int64_t forward_keys = rules   ? (small ? 128 : 96)
                                    : small ? 192
                                            : 176,
                     query_keys = rules   ? 64
                                  : small ? 128
                                          : 96;
  Device& device = emulated_hopper_device();
  const auto rows = [&](std::int64_t count) { return device.adopt(normal({count, D}, 1).to(at::kBFloat16)); };
  const auto sums = [&](std::int64_t count) { return device.adopt(at::zeros({count, D}, at::kFloat)); };
  std::vector<std::int32_t> ends, depths;
  for (std::int64_t i = 0; i < T; ++i) {
    ends.push_back(static_cast<std::int32_t>((i / of.branch + 1) * of.branch));
    depths.push_back(static_cast<std::int32_t>(of.depth(i)));
  }
  const at::Tensor lse = device.adopt(at::zeros({1, T}, at::kFloat)), out = rows(T), q = rows(T), k = rows(T),
                   v = rows(T), path_k = rows(P), path_v = rows(P), end = device.adopt(whole_numbers(ends)),
                   depth = of.window > 0 ? device.adopt(whole_numbers(depths)) : at::Tensor();
  const AttentionProblem problem{D, q, k, v, path_k, path_v, at::Tensor(), end, of.window, depth};
  emulation::set_seed(1);
  emulation::reset_counters();
  device.operations().attention(problem, out, lse);
  device.synchronize();
  std::string problems = counted("forward", 2 * of.tiles(128, forward_keys, true, true) * (steps + forward_keys / 16));
  emulation::reset_counters();
  device.operations().add_attention_backward(problem, out, lse, rows(T), {rows(T), sums(T), sums(T), sums(P), sums(P)});
  device.synchronize();
  const std::int64_t of_queries = 2 * of.tiles(128, query_keys, true, true) * (2 * steps + query_keys / 16);
  const std::int64_t of_keys = 2 * of.tiles(64, 128, true, true) * (2 * steps + 2 * 64 / 16);
  return problems + counted("backward", of_queries + of_keys);
}

}  // namespace

std::vector<KernelCheck> hopper_checks() {
  std::vector<KernelCheck> checks;
  for (OperationCase& moved : attention_cases()) {
    if (!is_taken(moved)) continue;
    const auto each = std::make_shared<const OperationCase>(std::move(moved));
    const auto answer = std::make_shared<Tensors>();
    const std::string name = text_of("hopper: ", each->operation, ", ", each->sizes);
    checks.push_back({Kind::answer, "Hopper", name, [=] { return answer_problem(*each, *answer); }});
    checks.push_back({Kind::orders, "Hopper", name, [=] { return orders_problem(*each); }});
    if (each->operation == kBackward && each->sizes == kOfLaunches)
      checks.push_back({Kind::answer, "Hopper", text_of("hopper: launches of ", each->sizes),
                        [=] { return problem_of_launches(*each, *answer); }});
  }
  // As many tiles as blocks; a tile too few; a block of each head at a time; two of each head, then one; fewer blocks
  // than heads; a path of one row; a window; a cap.
  for (const Turns& of : {Turns{20, 130, 4, 2, 128, 8}, Turns{20, 130, 2, 2, 128, 0}, Turns{20, 130, 2, 2, 2, 4},
                          Turns{20, 300, 6, 2, 5, 18}, Turns{20, 20, 2, 2, 1, 0}, Turns{20, 1, 1, 1, 128, 1},
                          Turns{20, 20, 1, 1, 128, 0, 1}, Turns{20, 20, 1, 1, 128, 0, 0, 1}})
    checks.push_back({Kind::instructions, "HopperTiles",
                      text_of("hopper: sums in turn, path ", of.path, ", ", of.heads, "/", of.kv_heads, " heads, ",
                              of.most, " blocks at a time, window ", of.window, ", cap ", of.cap),
                      [of] { return problem_of_turns(of); }});
  checks.push_back({Kind::answer, "HopperTiles", "hopper: scores far below 0", problem_of_low_scores});
  checks.push_back({Kind::answer, "HopperTiles", "hopper: problems that are taken", problem_of_taken});
  for (const Branches& of : {Branches{200, 192, 3}, Branches{0, 300, 1}, Branches{512, 128, 3, 40},
                             Branches{40, 100, 1, 60, 128}, Branches{0, 150, 1, 0, 128}})
    checks.push_back({Kind::instructions, "HopperTiles",
                      text_of("hopper: tiles of ", of.count, " branches of ", of.branch, " rows, path ", of.path,
                              ", window ", of.window, ", head of ", of.head_dim),
                      [of] { return problem_of_tiles(of); }});
  return checks;
}

}  // namespace espalier::testing
