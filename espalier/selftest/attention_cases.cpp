// Cases of attention and its sinks.
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/remainder.h>
#include <ATen/ops/roll.h>
#include <ATen/ops/tensor.h>
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

// Ends of subtrees of a tree with branches in branches: [0, T) split in a stem and two subtrees, each again.
void branch(std::vector<std::int32_t>& end, std::int32_t begin, std::int32_t last) {
  if (last - begin < 4) {
    for (std::int32_t i = begin; i < last; ++i) end[static_cast<std::size_t>(i)] = last;
    return;
  }
  const std::int32_t stem = begin + (last - begin) / 5 + 1, middle = stem + (last - stem) / 2;
  for (std::int32_t i = begin; i < stem; ++i) end[static_cast<std::size_t>(i)] = last;
  branch(end, stem, middle);
  branch(end, middle, last);
}

struct AttentionSize {
  std::int64_t own, path, heads = 1, kv_heads = 1, head_dim = 64;
  bool some_queries = false;  // every third own row, the last one twice
  double scale = 1;           // of the queries: scores are as large, and differ by as much
  std::int64_t window = 0;
  double soft_cap = 0;
  std::int64_t value_dim = 0;    // 0: head_dim
  std::int64_t branch_rows = 0;  // branches of this length below the path; 0: a tree
  std::int64_t leaf_rows = 0;    // rows leaf_rows - 1, 2 leaf_rows - 1, ... have no rows below them; 0: as it comes
  std::int64_t first_query = 0;  // queries are of the own rows from this one on
  bool counted = false;          // results say how many pairs are seen (counted_operands)
  std::int64_t unasked = 0;      // rows unasked - 1, 2 unasked - 1, ... have no query, in a last block; 0: all have
  std::int64_t last_query = 0;   // the own row behind the last query; 0: all rows from first_query on have one

  bool has_query_rows() const { return some_queries || first_query > 0 || last_query > 0 || unasked > 0; }
};

// The number of rows above each own row, the path's rows included.
std::vector<std::int32_t> depths_of(const std::vector<std::int32_t>& end, std::int64_t path) {
  std::vector<std::int32_t> depth(end.size(), static_cast<std::int32_t>(path));
  for (std::size_t row = 0; row < end.size(); ++row)
    for (std::size_t above = 0; above < row; ++above) depth[row] += end[above] > static_cast<std::int32_t>(row) ? 1 : 0;
  return depth;
}

std::vector<std::int32_t> ends_of(const AttentionSize& size) {
  std::vector<std::int32_t> end(static_cast<std::size_t>(size.own));
  const auto last = static_cast<std::int32_t>(size.own);
  if (size.branch_rows == 0) branch(end, 0, last);
  const auto rows = static_cast<std::int32_t>(size.branch_rows), leaf = static_cast<std::int32_t>(size.leaf_rows);
  for (std::int32_t i = 0; i < last; ++i) {
    std::int32_t& of_row = end[static_cast<std::size_t>(i)];
    if (rows > 0) of_row = std::min(last, (i / rows + 1) * rows);
    if (leaf > 0 && i % leaf == leaf - 1) of_row = i + 1;
  }
  return end;
}

// Own rows of queries, and of each own row the end of its subtree and the rows above it.
struct AttentionTree {
  std::vector<std::int32_t> query_row, end, depth;
};

AttentionTree tree_of(const AttentionSize& size) {
  AttentionTree tree{{}, ends_of(size), {}};
  tree.depth = depths_of(tree.end, size.path);
  const std::int64_t last = size.last_query > 0 ? size.last_query : size.own;
  for (auto i = static_cast<std::int32_t>(size.first_query); i < last; i += size.some_queries ? 3 : 1)
    if (size.unasked == 0 || i % size.unasked != size.unasked - 1) tree.query_row.push_back(i);
  if (size.some_queries) tree.query_row.push_back(tree.query_row.back());
  return tree;
}

// How many keys each query sees.
std::vector<double> keys_seen(const AttentionSize& size, const AttentionTree& tree) {
  std::vector<double> seen;
  for (const std::int32_t row : tree.query_row) {
    const auto at = static_cast<std::size_t>(row);
    const std::int64_t first = size.window > 0 ? tree.depth[at] + 1 - size.window : 0;
    std::int64_t keys = size.path - std::clamp(first, std::int64_t{0}, size.path);
    for (std::size_t key = 0; key <= at; ++key) keys += row < tree.end[key] && tree.depth[key] >= first ? 1 : 0;
    seen.push_back(static_cast<double>(keys));
  }
  return seen;
}

struct AttentionOperands {
  at::Tensor q, own_k, own_v, path_k, path_v, grad_out;
};

AttentionOperands random_operands(const AttentionSize& size, std::int64_t Q, std::int64_t V) {
  const std::int64_t H = size.heads, J = size.kv_heads, D = size.head_dim;
  return {normal({Q, H * D}, 40) * size.scale, normal({size.own, J * D}, 41),  normal({size.own, J * V}, 42),
          normal({size.path, J * D}, 43),      normal({size.path, J * V}, 44), normal({Q, H * V}, 47)};
}

// Operands of one head whose scores are all 0, so that query i with n_i keys gives each the weight 1 / n_i and has the
// log-sum-exp log n_i. Key j, the path's first, is 1 in column j mod D/2 of k, and j mod 2 in v; query i is 1 in
// column i mod D/2 of the other half of q, and n_i in column i mod D of the result's gradient. With f_i the share of
// odd keys that i sees:
//   gV_j: in column c how many of the queries i = c (mod D) see j
//   dQ_i / scale: in column c the sum of (j mod 2) - f_i over the keys j = c (mod D/2) that i sees; gK_j as well, over
//   i
// A pair that is seen or not makes a difference of 1 among a few, and of 1/2 of scale.
AttentionOperands counted_operands(const AttentionSize& size, const std::vector<double>& seen) {
  const std::int64_t D = size.head_dim, half = D / 2, T = size.own, P = size.path;
  const auto Q = static_cast<std::int64_t>(seen.size());
  const auto ones = [](std::int64_t first, std::int64_t count, std::int64_t period, std::int64_t width) {
    const at::Tensor column = at::remainder(at::arange(first, first + count, at::kLong), period);
    return at::zeros({count, width}, at::kDouble).scatter(1, column.unsqueeze(1), 1);
  };
  const auto parity = [&](std::int64_t first, std::int64_t count) {
    return at::remainder(at::arange(first, first + count, at::kDouble), 2).unsqueeze(1).repeat({1, D});
  };
  return {at::roll(ones(0, Q, half, D), half, 1),
          ones(P, T, half, D),
          parity(P, T),
          ones(0, P, half, D),
          parity(0, P),
          ones(0, Q, D, D) * at::tensor(seen, at::kDouble).unsqueeze(1)};
}

std::string text_of_size(const AttentionSize& size) {
  const auto [T, P, H, J, D, some, scale, window, cap, V, branch_rows, leaf_rows, first_query, counted, unasked,
              last_query] = size;
  std::string text = text_of(T, " rows, path ", P, ", ", H, "/", J, " heads of ", D,
                             some || first_query > 0 || last_query > 0 ? ", some queries" : "",
                             scale > 1 ? ", large" : "", branch_rows > 0 ? text_of(", branches of ", branch_rows) : "");
  if (V != 0 && V != D) text += text_of(", values of ", V);
  if (window > 0) text += text_of(", window of ", window);
  if (cap > 0) text += text_of(", cap of ", cap);
  if (unasked > 0) text += text_of(", no query at every ", unasked, "th row");
  return text + (counted ? ", counted" : "");
}

void add_attention_case(std::vector<OperationCase>& cases, const AttentionSize& size) {
  const auto [T, P, H, J, D, some, scale, window, cap, of_values, branch_rows, leaf_rows, first_query, counted, unasked,
              last_query] = size;
  const AttentionTree tree = tree_of(size);
  const auto Q = static_cast<std::int64_t>(tree.query_row.size());
  const std::int64_t V = of_values > 0 ? of_values : D;
  const std::string sizes = text_of_size(size);
  const AttentionOperands of = counted ? counted_operands(size, keys_seen(size, tree)) : random_operands(size, Q, V);
  const OperationCase::Argument q{of.q}, own_k{of.own_k}, own_v{of.own_v}, path_k{of.path_k}, path_v{of.path_v},
      row{whole_numbers(tree.query_row), Kind::fixed}, ends{whole_numbers(tree.end), Kind::fixed},
      depth{whole_numbers(tree.depth), Kind::fixed};
  const bool has_query_rows = size.has_query_rows(), in_runs = unasked > 0;
  const auto problem = [=, window = window, cap = cap, D = D](const Tensors& t, const at::Tensor& depths) {
    const at::Tensor rows = has_query_rows ? t[5] : at::Tensor();
    return AttentionProblem{D, t[0], t[1],   t[2], t[3], t[4], rows, t[6], window, window > 0 ? depths : at::Tensor(),
                            0, cap,  in_runs};
  };
  // bfloat16: the weights and their slopes are rounded as factors of a second product, whose sums over keys (or over
  // queries) of either sign are as large as the root of their number, less than the largest result. Where numbers are
  // counted all summands have one sign: four roundings, of the result in delta, of slope or weight, of the gradient of
  // the result, and of a gradient. The log-sum-exp, compared alone, has no factor that is rounded.
  const double keys = static_cast<double>(T + P), exponents = 8 + scale * static_cast<double>(D);
  cases.push_back({"attention",
                   sizes,
                   {q,
                    own_k,
                    own_v,
                    path_k,
                    path_v,
                    row,
                    ends,
                    {normal({Q, H * V}, 45), Kind::activation, !counted},
                    {normal({H, Q}, 46), Kind::sum, true},
                    depth},
                   [problem](const Ops& o, const Tensors& t) { o.attention(problem(t, t[9]), t[7], t[8]); },
                   counted ? 0.0 : 2.0,
                   counted ? 32 : exponents + keys});
  if (scale > 1) return;  // one key has all of the weight: slopes are nothing but rounding
  OperationCase backward{"add_attention_backward",
                         sizes,
                         {q, own_k, own_v, path_k, path_v, row, ends},
                         {},
                         counted ? 4 : 4 + root(T + P),
                         counted ? 64 + keys : 4 * (exponents + keys * root(T + P))};
  backward.arguments.push_back({of.grad_out});
  for (const auto& [count, width] :
       {std::pair{Q, H * D}, std::pair{T, J * D}, std::pair{T, J * V}, std::pair{P, J * D}, std::pair{P, J * V}}) {
    const bool of_query = backward.arguments.size() == 8;
    const at::Tensor before = normal({count, width}, 48 + backward.arguments.size(), counted ? 0 : 1);
    backward.arguments.push_back({before, of_query ? Kind::activation : Kind::sum, true});
  }
  if (window == 1) backward.arguments[8].least = 1;  // rows that see themselves alone: terms of 1, the difference 0
  backward.arguments.push_back({at::zeros({Q, H * V}, at::kDouble)});
  backward.arguments.push_back({at::zeros({H, Q}, at::kDouble), Kind::sum});
  backward.arguments.push_back(depth);
  backward.call = [problem](const Ops& o, const Tensors& t) {
    o.attention(problem(t, t[15]), t[13], t[14]);
    o.add_attention_backward(problem(t, t[15]), t[13], t[14], t[7], {t[8], t[9], t[10], t[11], t[12]});
  };
  cases.push_back(backward);
}

// Sums of exponentials are of either sign of a few units; the sink's gradient is a sum over rows.
void add_sink_cases(std::vector<OperationCase>& cases, std::int64_t rows, std::int64_t heads, std::int64_t head_dim) {
  const std::string sizes = text_of(rows, " rows, ", heads, " heads of ", head_dim);
  const OperationCase::Argument sink{normal({heads}, 112)}, lse{normal({heads, rows}, 114), Kind::sum, true};
  const std::int64_t width = heads * head_dim;
  cases.push_back({"join_sinks",
                   sizes,
                   {sink, {normal({rows, width + 8}, 113), Kind::activation, true}, lse},
                   [width](const Ops& o, const Tensors& t) { o.join_sinks(t[0], t[1].narrow(1, 0, width), t[2]); },
                   1,
                   32});
  cases.push_back({"add_sinks_backward",
                   sizes,
                   {sink,
                    {normal({rows, width + 8}, 113)},
                    {lse.value + 3, Kind::sum},
                    {normal({rows, width + 3}, 115)},
                    {normal({heads}, 116), Kind::sum, true}},
                   [width](const Ops& o, const Tensors& t) {
                     o.add_sinks_backward(t[0], t[1].narrow(1, 0, width), t[2], t[3].narrow(1, 0, width), t[4]);
                   },
                   0,
                   32 + 4 * static_cast<double>(rows + head_dim) * root(rows * head_dim)});
}

}  // namespace

std::vector<OperationCase> attention_cases() {
  std::vector<OperationCase> cases;
  for (const AttentionSize& size :
       {AttentionSize{1, 0, 1, 1, 8, false}, AttentionSize{37, 5, 4, 2, 16, false},
        AttentionSize{33, 40, 2, 1, 64, true}, AttentionSize{32, 32, 2, 2, 40, false},
        AttentionSize{9, 3, 3, 1, 256, true}, AttentionSize{150, 70, 2, 1, 64, false},
        AttentionSize{70, 65, 2, 2, 128, true}, AttentionSize{67, 70, 2, 1, 96, false},
        AttentionSize{66, 33, 1, 1, 192, false}, AttentionSize{65, 34, 2, 1, 256, false},
        AttentionSize{68, 40, 4, 2, 64, false}, AttentionSize{66, 8, 1, 1, 64, true},
        AttentionSize{200, 10, 1, 1, 64, true}, AttentionSize{70, 3, 2, 1, 64, false, 1000}})
    add_attention_case(cases, size);
  // Windows that end within a tile, at its ends and behind all rows; branches that begin again below the path.
  for (const AttentionSize& size :
       {AttentionSize{.own = 40, .path = 70, .heads = 2, .kv_heads = 1, .head_dim = 16, .window = 33},
        AttentionSize{
            .own = 9, .path = 3, .heads = 3, .kv_heads = 1, .head_dim = 256, .some_queries = true, .window = 2},
        AttentionSize{.own = 70, .path = 200, .heads = 2, .kv_heads = 1, .head_dim = 64, .window = 65},
        AttentionSize{.own = 200, .path = 130, .window = 8, .branch_rows = 64},
        AttentionSize{.own = 68, .path = 40, .heads = 2, .kv_heads = 2, .head_dim = 96, .window = 1000},
        AttentionSize{.own = 150, .path = 0, .some_queries = true, .window = 20},
        AttentionSize{.own = 66,
        .path = 64,
        .heads = 2,
        .kv_heads = 1,
        .head_dim = 128,
        .window = 64,
        .soft_cap = 3,
        .branch_rows = 64},
        AttentionSize{.own = 130, .path = 0, .window = 66, .branch_rows = 130},
        AttentionSize{.own = 65, .path = 33, .head_dim = 192, .window = 30},
        AttentionSize{.own = 66, .path = 34, .head_dim = 256, .window = 40, .soft_cap = 2},
        AttentionSize{.own = 70, .path = 40, .heads = 2, .kv_heads = 1, .head_dim = 192, .value_dim = 128},
        AttentionSize{
            .own = 67, .path = 36, .heads = 2, .kv_heads = 1, .head_dim = 192, .window = 33, .value_dim = 128},
        // Several blocks of the path's keys, each of which begins with another tile of queries.
        AttentionSize{.own = 70, .path = 300, .heads = 4, .kv_heads = 2, .head_dim = 128},
        // The path's keys add to the queries of a second block, which has half of its tiles.
        AttentionSize{.own = 130, .path = 20, .head_dim = 128},
        AttentionSize{.own = 70, .path = 20, .heads = 2, .kv_heads = 1, .head_dim = 64, .soft_cap = 2},
        AttentionSize{.own = 37, .path = 5, .heads = 4, .kv_heads = 2, .head_dim = 24, .soft_cap = 1, .value_dim = 16},
        AttentionSize{.own = 20, .path = 15, .heads = 2, .kv_heads = 2, .head_dim = 64, .value_dim = 128}})
    add_attention_case(cases, size);
  // Tiles of own rows that all queries of a tile see whole: of one branch, of some of its rows, of branches that
  // end before a tile does, and where a window ends between those that reach a whole tile and those that do not.
  for (const AttentionSize& size :
       {AttentionSize{.own = 200, .path = 0, .heads = 2, .kv_heads = 1, .head_dim = 64, .branch_rows = 200},
        AttentionSize{.own = 260, .path = 63, .some_queries = true, .branch_rows = 260},
        AttentionSize{.own = 254, .path = 64, .branch_rows = 127},
        AttentionSize{.own = 200, .path = 70, .window = 140, .branch_rows = 200},
        // Branches that begin within a tile of queries, at an odd row, so that the row that sees furthest stands there.
        AttentionSize{.own = 170, .path = 130, .window = 40, .branch_rows = 33},
        // A branch that ends one row before a tile of queries does.
        AttentionSize{.own = 190, .path = 33, .branch_rows = 95}})
    add_attention_case(cases, size);
  // Last blocks: the last row of each branch has no query, or a row within each branch, or a row of a tree.
  for (const AttentionSize& size :
       {AttentionSize{.own = 210, .path = 40, .heads = 2, .kv_heads = 1, .branch_rows = 70, .unasked = 70},
        AttentionSize{
            .own = 200, .path = 33, .heads = 2, .kv_heads = 2, .head_dim = 40, .branch_rows = 100, .unasked = 70},
        AttentionSize{.own = 150, .path = 0, .heads = 2, .kv_heads = 1, .unasked = 40}})
    add_attention_case(cases, size);
  // Heads that products of matrices take on a GPU: sides of scores that are no multiples of 8, or empty.
  for (const AttentionSize& size :
       {AttentionSize{.own = 21, .path = 13, .heads = 4, .kv_heads = 2, .head_dim = 264},
        AttentionSize{.own = 26, .path = 0, .heads = 2, .kv_heads = 1, .head_dim = 24, .value_dim = 320},
        AttentionSize{.own = 19,
        .path = 30,
        .head_dim = 512,
        .some_queries = true,
        .window = 17,
        .soft_cap = 2,
        .branch_rows = 8},
        AttentionSize{.own = 8, .path = 4, .head_dim = 260, .first_query = 8},
        // More keys than a block has threads; a maximum in each of its warps, without which exponentials are infinite.
        AttentionSize{.own = 5, .path = 300, .head_dim = 264},
        AttentionSize{.own = 24, .path = 270, .heads = 2, .head_dim = 264, .scale = 1000}})
    add_attention_case(cases, size);
  // One row; rows that see themselves alone; no queries.
  add_attention_case(cases, {.own = 1, .path = 1});
  add_attention_case(cases, {.own = 66, .path = 64, .window = 1});
  add_attention_case(cases, {.own = 66, .path = 40, .window = 20, .first_query = 66});
  // A block of keys that no query sees: before the branch that has queries, and behind the last query.
  add_attention_case(cases, {.own = 260, .path = 0, .branch_rows = 130, .first_query = 130});
  add_attention_case(cases, {.own = 200, .path = 20, .branch_rows = 200, .last_query = 60});
  // A cap without a window, where tiles are seen whole.
  add_attention_case(cases, {.own = 129, .path = 0, .soft_cap = 1, .branch_rows = 129});
  // Pairs that are seen where one row of a tile is another than the rest: one that nobody below it sees, in several
  // places; the one at which a window ends; a branch that begins in the second half of a tile of queries, the last of
  // which has one half; a branch without queries before all others; a window whose only path row is the last one; a
  // last query that is the first key of a block of 128; a branch that ends one row before a tile of queries does, and
  // one that ends with it, before another branch.
  for (const AttentionSize& size :
       {AttentionSize{.own = 260, .path = 0, .some_queries = true, .branch_rows = 260, .leaf_rows = 65},
        AttentionSize{.own = 192, .path = 0, .window = 127, .branch_rows = 192},
        AttentionSize{.own = 224, .path = 70, .window = 20, .branch_rows = 100},
        AttentionSize{.own = 140, .path = 0, .branch_rows = 64, .first_query = 70},
        AttentionSize{.own = 66, .path = 64, .window = 2},
        AttentionSize{.own = 129, .path = 0, .branch_rows = 129, .first_query = 126},
        AttentionSize{.own = 192, .path = 20, .branch_rows = 191},
        AttentionSize{.own = 193, .path = 0, .branch_rows = 192},
        // Keys that some rows of a tile see, with depths greater than any row; then the only row of its kind at each
        // place of a warp, or behind it: leaves, and the row that sees furthest.
        AttentionSize{.own = 135, .path = 140, .window = 1000, .branch_rows = 130, .first_query = 127},
        AttentionSize{.own = 259, .path = 0, .branch_rows = 259, .leaf_rows = 32, .first_query = 256},
        AttentionSize{.own = 261, .path = 0, .branch_rows = 261, .leaf_rows = 33, .first_query = 256},
        AttentionSize{.own = 100, .path = 130, .window = 4, .branch_rows = 95},
        AttentionSize{.own = 100, .path = 130, .window = 4, .branch_rows = 96}}) {
    AttentionSize counted = size;
    counted.counted = true;
    add_attention_case(cases, counted);
  }
  add_sink_cases(cases, 1, 1, 8);
  add_sink_cases(cases, 37, 3, 40);
  add_sink_cases(cases, 300, 2, 64);
  return cases;
}

}  // namespace espalier
