#include "espalier/ops/cuda/wide_attention.h"

#include <algorithm>

#include "espalier/device/scalar_type.h"
#include "espalier/mixers/attention/wide_work.h"
#include "espalier/ops/cuda/attention.h"
#include "espalier/ops/cuda/launch.h"
#include "espalier/ops/cuda/products.h"

namespace espalier::cuda {
namespace {

using attention::Gradients;
using attention::Inputs;
using attention::Rows;
using attention::Shape;

template <class T>
constexpr at::ScalarType kDtype = c10::CppTypeToScalarType<T>::value;
template <>
constexpr at::ScalarType kDtype<bfloat16> = at::kBFloat16;

// A matrix whose rows stand in memory `stride` elements apart, or its transpose.
template <class T>
struct Matrix {
  T* data = nullptr;
  std::int64_t rows = 0, columns = 0, stride = 0;
  bool transposed = false;

  Matrix t() const { return {data, columns, rows, stride, !transposed}; }
};

// c = a b, or c += a b; c is not transposed. Nothing to do where a size is 0. cuBLAS has columns where these have rows,
// so it computes the transpose of c.
template <class A, class T>
void multiply(const Matrix<A>& c_RN, const Matrix<const T>& a_RK, const Matrix<const T>& b_KN, bool adds) {
  if (c_RN.rows == 0 || c_RN.columns == 0 || a_RK.columns == 0) return;
  run_product({.transpose_a = b_KN.transposed,
               .transpose_b = a_RK.transposed,
               .m = c_RN.columns,
               .n = c_RN.rows,
               .k = a_RK.columns,
               .a = b_KN.data,
               .lda = b_KN.stride,
               .b = a_RK.data,
               .ldb = a_RK.stride,
               .c = c_RN.data,
               .ldc = c_RN.stride,
               .in = kDtype<T>,
               .out = kDtype<A>,
               .adds = adds});
}

// Blocks of query rows of one head after the other, with the matrices of their products.
template <class T>
class Walk {
 public:
  using A = accumulator_t<T>;

  Walk(const Shape& shape, const Inputs<T>& in, bool gradients)
      : shape_(shape),
        in_(in),
        room_(WideRoom::of({sizeof(T), sizeof(A)}, shape.query_rows, shape.path_rows, shape.own_rows,
                           std::max(shape.head_dim, shape.value_dim), gradients)) {}

  std::int64_t rows() const { return room_.rows; }
  std::int64_t numbers() const { return room_.rows * room_.columns; }

  // Calls visit(head) for every block of each head.
  void for_each(auto&& visit) {
    for (head_ = 0; head_ < shape_.heads; ++head_)
      for (block_.first = 0; block_.first < shape_.query_rows; block_.first += room_.rows) {
        block_.rows = std::min(room_.rows, shape_.query_rows - block_.first);
        // Chosen rows are known on the device alone.
        block_.own_rows =
            shape_.query_row != nullptr ? shape_.own_rows : std::min(shape_.own_rows, block_.first + block_.rows);
        block_.own_column = WideRoom::padded(shape_.path_rows);
        block_.columns = block_.own_column + WideRoom::padded(block_.own_rows);
        visit();
      }
  }

  const ScoreBlock& block() const { return block_; }
  std::int64_t head() const { return head_; }
  std::int64_t first_number() const { return head_ * shape_.query_rows; }  // of the head's, one for each query

  // Columns of scores that belong to the path, or to own rows.
  template <class N>
  Matrix<N> part(N* all_BC, bool path) const {
    return {all_BC + (path ? 0 : block_.own_column), block_.rows, path ? shape_.path_rows : block_.own_rows,
            block_.columns};
  }
  Matrix<const T> keys(bool path) const { return of_keys(path ? in_.path_k : in_.own_k, shape_.head_dim, path); }
  Matrix<const T> values(bool path) const { return of_keys(path ? in_.path_v : in_.own_v, shape_.value_dim, path); }
  template <class N>
  Matrix<N> of_keys(const Rows<N>& rows, std::int64_t width, bool path) const {
    const std::int64_t kv_head = head_ / (shape_.heads / shape_.kv_heads);
    return {rows.data + kv_head * width, path ? shape_.path_rows : block_.own_rows, width, rows.stride};
  }
  template <class N>
  Matrix<N> of_queries(const Rows<N>& rows, std::int64_t width) const {
    return {rows.data + block_.first * rows.stride + head_ * width, block_.rows, width, rows.stride};
  }
  Matrix<const T> queries() const { return of_queries(in_.q, shape_.head_dim); }

  // out = first second^T, the factors of both parts.
  void scores(A* out_BC, const Matrix<const T>& queries, auto&& of_part) const {
    for (const bool path : {true, false}) multiply(part(out_BC, path), queries, of_part(path).t(), false);
  }
  // to = factor of_part, summed over both parts in `sum`.
  void results(const T* factor_BC, auto&& of_part, A* sum_BW, const Rows<T>& to, std::int64_t width) const {
    for (const bool path : {true, false})
      multiply(Matrix<A>{sum_BW, block_.rows, width, width}, part(factor_BC, path), of_part(path),
               !path && shape_.path_rows > 0);
    const Matrix<T> rows = of_queries(to, width);
    round_rows<T>(block_.rows, width, sum_BW, {rows.data, rows.stride});
  }

 private:
  const Shape& shape_;
  const Inputs<T>& in_;
  WideRoom room_;
  ScoreBlock block_;
  std::int64_t head_ = 0;
};

}  // namespace

template <class T>
void wide_attention(const Shape& shape, const Inputs<T>& in, Rows<T> out, accumulator_t<T>* lse_HQ) {
  using A = accumulator_t<T>;
  Walk<T> walk(shape, in, false);
  const Scratch<A> score(walk.numbers()), sum(walk.rows() * shape.value_dim);
  const Scratch<T> weight(walk.numbers());
  walk.for_each([&] {
    walk.scores(score.get(), walk.queries(), [&](bool path) { return walk.keys(path); });
    weigh_scores(shape, walk.block(), score.get(), weight.get(), lse_HQ + walk.first_number());
    walk.results(
        weight.get(), [&](bool path) { return walk.values(path); }, sum.get(), out, shape.value_dim);
  });
}

template <class T>
void add_wide_attention_backward(const Shape& shape, const Inputs<T>& in, Rows<const T> out,
                                 const accumulator_t<T>* lse_HQ, Rows<const T> grad_out, const Gradients<T>& grads) {
  using A = accumulator_t<T>;
  const Scratch<A> delta(shape.heads * shape.query_rows);
  attention_delta(shape, out, grad_out, delta.get());
  Walk<T> walk(shape, in, true);
  const Scratch<A> score(walk.numbers()), product(walk.numbers()), sum(walk.rows() * shape.head_dim);
  const Scratch<T> weight(walk.numbers()), slope(walk.numbers());
  walk.for_each([&] {
    const Matrix<const T> queries = walk.queries(), grad = walk.of_queries(grad_out, shape.value_dim);
    walk.scores(score.get(), queries, [&](bool path) { return walk.keys(path); });
    walk.scores(product.get(), grad, [&](bool path) { return walk.values(path); });
    weigh_slopes(shape, walk.block(), score.get(), product.get(), lse_HQ + walk.first_number(),
                 delta.get() + walk.first_number(), weight.get(), slope.get());
    walk.results(
        slope.get(), [&](bool path) { return walk.keys(path); }, sum.get(), grads.q, shape.head_dim);
    for (const bool path : {true, false}) {
      const auto turned = [&](const T* factor) { return walk.template part<const T>(factor, path).t(); };
      multiply(walk.of_keys(path ? grads.path_k : grads.own_k, shape.head_dim, path), turned(slope.get()), queries,
               true);
      multiply(walk.of_keys(path ? grads.path_v : grads.own_v, shape.value_dim, path), turned(weight.get()), grad,
               true);
    }
  });
}

#define ESPALIER_INSTANTIATE(T)                                                                                     \
  template void wide_attention(const Shape&, const Inputs<T>&, Rows<T>, accumulator_t<T>*);                         \
  template void add_wide_attention_backward(const Shape&, const Inputs<T>&, Rows<const T>, const accumulator_t<T>*, \
                                            Rows<const T>, const Gradients<T>&);
ESPALIER_INSTANTIATE(float)
ESPALIER_INSTANTIATE(double)
ESPALIER_INSTANTIATE(bfloat16)
#undef ESPALIER_INSTANTIATE

}  // namespace espalier::cuda
