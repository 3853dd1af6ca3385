// Cases of norms, rotations, SwiGLU, the moving of rows and products.
#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>

#include "espalier/base/error.h"
#include "espalier/selftest/operation_check.h"

namespace espalier {
namespace {

using Kind = OperationCase::Kind;
using Tensors = std::vector<at::Tensor>;
using Ops = Operations;

// Rows that a wider matrix has at its columns from 2 on: a stride, and an address that is no multiple of 16.
at::Tensor inner(const at::Tensor& x, std::int64_t width) { return x.narrow(1, 2, width); }

// Errors of a row: its sum of squares (width terms), root and reciprocal, two products that are rounded.
void add_norm_cases(std::vector<OperationCase>& cases) {
  struct Size {
    std::int64_t rows, width;
  };
  for (const auto [rows, width] : {Size{1, 5}, Size{3, 64}, Size{5, 264}, Size{2, 2056}, Size{2, 515}, Size{531, 8},
                                   Size{16, 1}, Size{16, 9}, Size{0, 8}}) {
    const std::string sizes = text_of(rows, " x ", width);
    const at::Tensor stream = normal({rows, width}, 1), weight = normal({width}, 2), grad = normal({rows, width}, 3);
    const at::Tensor rstd = normal({rows}, 4).abs() + 0.5, zeros = at::zeros({rows, width}, at::kDouble);
    cases.push_back({"norm",
                     sizes,
                     {{stream}, {weight}, {zeros, Kind::activation, true}, {rstd, Kind::sum, true}},
                     [](const Ops& o, const Tensors& t) { o.norm(t[0], t[1], 1e-6, t[2], t[3]); },
                     2,
                     8 + static_cast<double>(width)});
    cases.push_back({"norm_again",
                     sizes,
                     {{stream}, {weight}, {rstd, Kind::sum}, {zeros, Kind::activation, true}},
                     [](const Ops& o, const Tensors& t) { o.norm_again(t[0], t[1], t[2], t[3]); },
                     2,
                     4});
    // The weight's gradient is a sum over rows of values that are rounded once.
    cases.push_back({"add_norm_backward",
                     sizes,
                     {{stream},
                      {weight},
                      {rstd, Kind::sum},
                      {grad},
                      {normal({rows, width}, 5), Kind::activation, true},
                      {normal({width}, 6), Kind::sum, true}},
                     [](const Ops& o, const Tensors& t) { o.add_norm_backward(t[0], t[1], t[2], t[3], t[4], t[5]); },
                     1 + root(rows),
                     8 + static_cast<double>(width) + static_cast<double>(rows) * root(rows)});
    cases.push_back(cases.back());
    cases.back().sizes += ", weight held";
    cases.back().call = [](const Ops& o, const Tensors& t) {
      o.add_norm_backward(t[0], t[1], t[2], t[3], t[4], at::Tensor());
    };
  }
}

void add_rotation_cases(std::vector<OperationCase>& cases) {
  struct Size {
    std::int64_t rows, heads, head_dim;
    bool norm, strided;
  };
  for (const auto [rows, heads, D, norm, strided] :
       {Size{5, 3, 64, true, false}, Size{3, 2, 128, true, false}, Size{2, 1, 256, true, false},
        Size{4, 2, 96, false, false}, Size{3, 2, 10, true, true}, Size{35, 4, 16, true, false},
        Size{2, 3, 70, true, true}, Size{7, 2, 128, false, true}, Size{1060, 2, 2, true, false},
        Size{1, 1, 16, true, false}, Size{0, 2, 16, true, false}, Size{3, 9, 64, true, false},
        Size{2, 8, 128, false, false}}) {
    const std::string sizes =
        text_of(rows, " x ", heads, " heads of ", D, norm ? ", norm" : "", strided ? ", strided" : "");
    const std::int64_t width = heads * D, wide = width + (strided ? 3 : 0);
    const at::Tensor angle = normal({9, D / 2}, 7, 3);
    std::vector<std::int32_t> positions;
    for (std::int64_t r = 0; r < rows; ++r) positions.push_back(static_cast<std::int32_t>((r * 5) % 9));
    const auto rotation = [norm = norm](const Tensors& t) {
      return Rotation{{t[0], t[1]}, t[2], norm ? t[3] : at::Tensor(), 1e-6};
    };
    const auto part = [strided = strided, width](const at::Tensor& x) { return strided ? inner(x, width) : x; };
    const auto row = [rows = rows, wide](std::uint64_t seed) { return normal({rows, wide}, seed); };
    const std::vector<OperationCase::Argument> tables = {{angle.cos(), Kind::sum},
                                                         {angle.sin(), Kind::sum},
                                                         {whole_numbers(positions), Kind::fixed},
                                                         {normal({D}, 8)},
                                                         {row(9)}};
    OperationCase forward{"rotate", sizes, tables, {}, 6, 16 + static_cast<double>(D)};
    forward.arguments.push_back({row(10), Kind::activation, true});
    forward.call = [=](const Ops& o, const Tensors& t) { o.rotate(rotation(t), part(t[4]), part(t[5])); };
    cases.push_back(forward);
    // In bfloat16 the tables and the normalised values of the weight's gradient are rounded.
    const double items = static_cast<double>(rows * heads), sum = items * std::sqrt(items);
    for (const Kind kind : {Kind::activation, Kind::sum}) {
      OperationCase backward{"add_rotate_backward",
                             sizes + (kind == Kind::sum ? ", sums" : ""),
                             tables,
                             {},
                             6 + 3 * std::sqrt(items),
                             24 + static_cast<double>(D) + sum};
      backward.arguments.push_back({row(11), kind});
      backward.arguments.push_back({row(12), Kind::activation, true});
      backward.arguments.push_back({normal({D}, 13), Kind::sum, true});
      backward.call = [=, norm = norm](const Ops& o, const Tensors& t) {
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
}

// exp(-g) of |g| up to 8 is off by as many units; gate, sigmoid and products.
void add_swiglu_cases(std::vector<OperationCase>& cases) {
  struct Size {
    std::int64_t rows, width;
  };
  for (const auto [rows, width] : {Size{1, 1}, Size{3, 8}, Size{2, 1032}, Size{5, 77}, Size{0, 8}}) {
    const std::string sizes = text_of(rows, " x ", width);
    const OperationCase::Argument gate_up{normal({rows, 2 * width}, 14)}, grad{normal({rows, width}, 15)};
    cases.push_back({"swiglu",
                     sizes,
                     {gate_up, {grad.value, Kind::activation, true}},
                     [](const Ops& o, const Tensors& t) { o.swiglu({}, t[0], t[1]); },
                     2,
                     24});
    cases.push_back(
        {"swiglu_backward",
         sizes,
         {gate_up, grad, {normal({rows, 2 * width}, 16), Kind::activation, true}, {grad.value, Kind::activation, true}},
         [](const Ops& o, const Tensors& t) { o.swiglu_backward({}, t[0], t[1], t[2], t[3]); },
         2,
         48});
    cases.push_back({"swiglu_backward",
                     sizes + ", in place",
                     {{gate_up.value, Kind::activation, true}, {grad.value, Kind::activation, true}},
                     [](const Ops& o, const Tensors& t) { o.swiglu_backward({}, t[0], t[1], t[0], t[1]); },
                     2,
                     48});
  }
}

std::vector<std::int32_t> rows_of_ids(std::int64_t rows, std::int64_t of) {
  std::vector<std::int32_t> ids;
  for (std::int64_t r = 0; r < rows; ++r) ids.push_back(static_cast<std::int32_t>((r * r + 3 * r + 1) % of));
  return ids;
}

// Sums of repeated rows: as many terms as one row is met.
void add_sum_cases(std::vector<OperationCase>& cases, std::int64_t rows, std::int64_t width, std::int64_t table) {
  const std::string sizes = text_of(rows, " x ", width, " to ", table);
  const at::Tensor ids = whole_numbers(rows_of_ids(rows, table)), x = normal({rows, width}, 20);
  const double terms = static_cast<double>(rows) * root(rows);
  for (const Kind kind : {Kind::activation, Kind::sum}) {
    const OperationCase::Argument into{normal({table, width}, 21), kind, true};
    const std::string which = sizes + (kind == Kind::sum ? ", sums" : "");
    // The CPU rounds a bfloat16 sum at each addition, a GPU once.
    cases.push_back({"add_scatter",
                     which,
                     {{x}, {ids, Kind::fixed}, into},
                     [](const Ops& o, const Tensors& t) { o.add_scatter(t[0], t[1], t[2]); },
                     kind == Kind::sum ? 0.0 : static_cast<double>(rows),
                     terms});
    cases.push_back({"add_look_up_backward",
                     which,
                     {{x}, {ids + 2, Kind::fixed}, into},
                     [](const Ops& o, const Tensors& t) { o.add_look_up_backward(t[0], t[1], 3, t[2]); },
                     kind == Kind::sum ? 0.0 : static_cast<double>(rows),
                     terms});
    cases.push_back({"add_look_up_backward",
                     which + ", ids above",
                     {{x}, {ids + 2, Kind::fixed}, into},
                     [](const Ops& o, const Tensors& t) { o.add_look_up_backward(t[0], t[1], 1, t[2]); },
                     kind == Kind::sum ? 0.0 : static_cast<double>(rows),
                     terms});
  }
}

void add_move_cases(std::vector<OperationCase>& cases, std::int64_t rows, std::int64_t width) {
  const std::string sizes = text_of(rows, " x ", width);
  const at::Tensor ids = whole_numbers(rows_of_ids(rows, 7)), x = normal({rows, width}, 22);
  const OperationCase::Argument to{normal({rows, width}, 23), Kind::activation, true};
  cases.push_back({"gather",
                   sizes,
                   {{normal({7, width}, 24)}, {ids, Kind::fixed}, to},
                   [](const Ops& o, const Tensors& t) { o.gather(t[0], t[1], t[2]); },
                   0});
  cases.push_back({"look_up",
                   sizes,
                   {{normal({4, width}, 24)}, {ids, Kind::fixed}, to},
                   [](const Ops& o, const Tensors& t) { o.look_up(t[0], t[1], 2, t[2]); },
                   0});
  cases.push_back({"zero_rows",
                   sizes,
                   {to, {ids, Kind::fixed}},
                   [](const Ops& o, const Tensors& t) { o.zero_rows(t[0], t[1], 1); },
                   0});
  cases.push_back({"scale", sizes, {to}, [](const Ops& o, const Tensors& t) { o.scale(t[0], 0.37); }, 1, 2});
  cases.push_back({"zero", sizes, {to}, [](const Ops& o, const Tensors& t) { o.zero(t[0]); }, 0});
  std::vector<std::int32_t> apart;
  for (std::int64_t r = 0; r < rows; ++r) apart.push_back(static_cast<std::int32_t>((r * 3 + 1) % (rows * 3 + 1)));
  const OperationCase::Argument table{normal({rows * 3 + 1, width}, 25), Kind::activation, true};
  cases.push_back({"scatter",
                   sizes + ", strided",
                   {{normal({rows, width + 3}, 26)}, {whole_numbers(apart), Kind::fixed}, table},
                   [width](const Ops& o, const Tensors& t) { o.scatter(inner(t[0], width), t[1], t[2]); },
                   0});
  for (const auto& [from, target] : {std::pair{std::int64_t{1}, rows + 1}, std::pair{std::int64_t{0}, std::int64_t{1}},
                                     std::pair{std::int64_t{2}, std::int64_t{1}}})
    cases.push_back(
        {"move_rows",
         text_of(sizes, ", ", from, " to ", target),
         {table},
         [=, from = from, target = target](const Ops& o, const Tensors& t) { o.move_rows(t[0], from, target, rows); },
         0});
  const OperationCase::Argument sums{normal({rows, width}, 27), Kind::sum, true};
  cases.push_back(
      {"convert", sizes + ", to sums", {{x}, sums}, [](const Ops& o, const Tensors& t) { o.convert(t[0], t[1]); }, 0});
  cases.push_back({"convert",
                   sizes + ", from sums",
                   {{normal({rows, width + 3}, 28), Kind::sum}, to},
                   [width](const Ops& o, const Tensors& t) { o.convert(inner(t[0], width), t[1]); },
                   1});
  const at::Tensor wide = normal({rows, width}, 29);
  cases.push_back({"convert",
                   sizes + ", float to double",
                   {{wide.to(at::kFloat), Kind::fixed}, {at::zeros_like(wide), Kind::fixed, true}},
                   [](const Ops& o, const Tensors& t) { o.convert(t[0], t[1]); },
                   0});
}

// Rows at the columns from 0 on of wider ones: widths and strides each of which alone forbids 16 bytes at a time.
void add_strided_cases(std::vector<OperationCase>& cases) {
  constexpr std::int64_t rows = 8;
  struct Size {
    std::int64_t width, from_stride, to_stride, from_first = 0, to_first = 0;
  };
  // Rows also begin at a multiple of 16 bytes that is none of 32, and at none of 16.
  for (const auto [width, from_stride, to_stride, from_first, to_first] :
       {Size{9, 16, 16}, Size{1, 16, 16}, Size{8, 17, 16}, Size{8, 16, 17}, Size{8, 24, 24, 8, 4},
        Size{8, 24, 24, 8, 1}}) {
    const std::string sizes = text_of(rows, " x ", width, " from ", from_first, " to ", to_first, ", strides ",
                                      from_stride, " and ", to_stride);
    const at::Tensor from = normal({rows, from_stride}, 110), to = normal({rows, to_stride}, 111);
    const auto part = [width = width](const at::Tensor& x, std::int64_t first) { return x.narrow(1, first, width); };
    for (const auto& [in, out] : {std::pair{Kind::activation, Kind::activation}, std::pair{Kind::activation, Kind::sum},
                                  std::pair{Kind::sum, Kind::activation}})
      cases.push_back({"convert",
                       sizes + (out == Kind::sum  ? ", to sums"
                                : in == Kind::sum ? ", from sums"
                                                  : ""),
                       {{from, in}, {to, out, true}},
                       [part, from = from_first, to = to_first](const Ops& o, const Tensors& t) {
                         o.convert(part(t[0], from), part(t[1], to));
                       },
                       in == Kind::sum ? 1.0 : 0.0});
  }
}

}  // namespace

std::vector<OperationCase> row_cases() {
  std::vector<OperationCase> cases;
  add_norm_cases(cases);
  add_rotation_cases(cases);
  add_swiglu_cases(cases);
  return cases;
}

std::vector<OperationCase> moving_cases() {
  std::vector<OperationCase> cases;
  add_move_cases(cases, 1, 1);
  add_move_cases(cases, 5, 24);
  add_move_cases(cases, 3, 2056);
  add_move_cases(cases, 4, 301);
  add_move_cases(cases, 8, 128);
  add_strided_cases(cases);
  add_sum_cases(cases, 0, 8, 2);
  add_sum_cases(cases, 1, 3, 2);
  add_sum_cases(cases, 9, 16, 1);
  add_sum_cases(cases, 260, 8, 11);
  add_sum_cases(cases, 513, 5, 700);
  return cases;
}

std::vector<OperationCase> product_cases() {
  std::vector<OperationCase> cases;
  struct Size {
    std::int64_t rows, inputs, outputs;
  };
  for (const auto [R, K, N] :
       {Size{1, 1, 1}, Size{5, 24, 40}, Size{70, 33, 300}, Size{16, 3, 1}, Size{16, 3, 9}, Size{0, 3, 8}}) {
    const std::string sizes = text_of(R, " x ", K, " to ", N);
    const OperationCase::Argument x{normal({R, K}, 30)}, weight{normal({N, K}, 31)}, bias{normal({N}, 32)},
        out{normal({R, N}, 33), Kind::activation, true}, grad{normal({R, N}, 34)},
        grad_x{normal({R, K}, 35), Kind::activation, true};
    const double terms_K = static_cast<double>(K) * root(K), terms_N = static_cast<double>(N) * root(N);
    cases.push_back({"linear",
                     sizes,
                     {out, x, weight, bias},
                     [](const Ops& o, const Tensors& t) { o.linear(t[0], t[1], t[2], t[3]); },
                     2,
                     terms_K});
    cases.push_back({"linear",
                     sizes + ", no bias",
                     {out, x, weight},
                     [](const Ops& o, const Tensors& t) { o.linear(t[0], t[1], t[2], at::Tensor()); },
                     1,
                     terms_K});
    // cuBLAS may round a product before it adds it to a result in bfloat16, and does for few rows on a Hopper GPU.
    cases.push_back({"linear_onto",
                     sizes,
                     {out, grad, x, weight, bias},
                     [](const Ops& o, const Tensors& t) { o.linear_onto(t[0], t[1], t[2], t[3], t[4]); },
                     3,
                     terms_K});
    cases.push_back({"linear_onto",
                     sizes + ", in place",
                     {out, x, weight},
                     [](const Ops& o, const Tensors& t) { o.linear_onto(t[0], t[0], t[1], t[2], at::Tensor()); },
                     2,
                     terms_K});
    cases.push_back({"linear_grad_input",
                     sizes,
                     {grad_x, grad, weight},
                     [](const Ops& o, const Tensors& t) { o.linear_grad_input(t[0], t[1], t[2]); },
                     1,
                     terms_N});
    cases.push_back({"add_linear_grad_input",
                     sizes,
                     {grad_x, grad, weight},
                     [](const Ops& o, const Tensors& t) { o.add_linear_grad_input(t[0], t[1], t[2]); },
                     2,
                     terms_N});
    // Where products are rounded before they are added, once more than elsewhere.
    cases.push_back(
        {"add_linear_grad_weight",
         sizes,
         {{normal({N, K}, 36), Kind::sum, true}, {normal({N}, 37), Kind::sum, true}, grad, x, {normal({N, K}, 38)}},
         [](const Ops& o, const Tensors& t) { o.add_linear_grad_weight(t[0], t[1], t[2], t[3], t[4]); },
         1,
         static_cast<double>(R) * root(R)});
    cases.push_back(cases.back());
    cases.back().sizes += ", weight held";
    cases.back().call = [](const Ops& o, const Tensors& t) {
      o.add_linear_grad_weight(at::Tensor(), t[1], t[2], t[3], t[4]);
    };
  }
  return cases;
}

}  // namespace espalier
