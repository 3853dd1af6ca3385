// The definition of shared-prefix attention: plain loops, float64 sums, any head size. Slow on purpose.
//
//   S_ij = scale q_i . k_j over the keys row i sees;  lse_i = log sum_j e^S_ij;  A = e^(S - lse);  out = A V
//   backward: D_i = dO_i . out_i;  dS = A o (dO V^T - D);  dQ = scale dS K;  gK += scale dS^T Q;  gV += A^T dO
#include <cmath>
#include <vector>

#include "espalier/ops/attention/attention.h"

namespace espalier::attention {
namespace {

// A key that a query row sees.
struct Seen {
  bool own = false;
  std::int64_t row = 0;
};

std::vector<Seen> seen_by(const Shape& shape, std::int64_t query) {
  std::vector<Seen> keys;
  for (std::int64_t j = 0; j < shape.path_rows; ++j) keys.push_back({false, j});
  const std::int64_t at = shape.query_row ? shape.query_row[query] : query;
  for (std::int64_t j = 0; j <= at; ++j)
    if (at < shape.subtree_end[j]) keys.push_back({true, j});
  return keys;
}

template <class X, class Y>
double dot(const X* x, const Y* y, std::int64_t n) {
  double sum = 0;
  for (std::int64_t d = 0; d < n; ++d) sum += static_cast<double>(x[d]) * static_cast<double>(y[d]);
  return sum;
}

// Head `head` of one row.
template <class T>
T* at(Rows<T> rows, std::int64_t row, std::int64_t head, const Shape& shape) {
  return rows.data + row * rows.stride + head * shape.head_dim;
}
template <class T>
T round_to(double x) {
  if constexpr (std::is_same_v<T, bfloat16>)
    return bfloat16(static_cast<float>(x));
  else
    return static_cast<T>(x);
}

// One query row and head: scores[j] for each seen key.
template <class T>
std::vector<double> scores_of(const Shape& shape, const Inputs<T>& in, const std::vector<Seen>& keys, std::int64_t row,
                              std::int64_t head) {
  const std::int64_t kv_head = head / (shape.heads / shape.kv_heads);
  std::vector<double> scores;
  for (const Seen& key : keys)
    scores.push_back(shape.scale * dot(at(in.q, row, head, shape),
                                       at(key.own ? in.own_k : in.path_k, key.row, kv_head, shape), shape.head_dim));
  return scores;
}

}  // namespace

template <class T>
void reference_forward(const Shape& shape, const Inputs<T>& in, Rows<T> out, accumulator_t<T>* lse_HQ) {
  for (std::int64_t i = 0; i < shape.query_rows; ++i) {
    const std::vector<Seen> keys = seen_by(shape, i);
    for (std::int64_t h = 0; h < shape.heads; ++h) {
      const std::int64_t j = h / (shape.heads / shape.kv_heads);
      const std::vector<double> scores = scores_of(shape, in, keys, i, h);
      double top = scores.at(0), total = 0;
      for (const double s : scores) top = std::max(top, s);
      for (const double s : scores) total += std::exp(s - top);
      const double lse = top + std::log(total);
      lse_HQ[h * shape.query_rows + i] = static_cast<accumulator_t<T>>(lse);
      std::vector<double> sum(shape.head_dim);
      for (std::size_t k = 0; k < keys.size(); ++k) {
        const double weight = std::exp(scores[k] - lse);
        const T* v = at(keys[k].own ? in.own_v : in.path_v, keys[k].row, j, shape);
        for (std::int64_t d = 0; d < shape.head_dim; ++d) sum[d] += weight * static_cast<double>(v[d]);
      }
      for (std::int64_t d = 0; d < shape.head_dim; ++d) at(out, i, h, shape)[d] = round_to<T>(sum[d]);
    }
  }
}

template <class T>
void add_reference_backward(const Shape& shape, const Inputs<T>& in, Rows<const T> out, const accumulator_t<T>* lse_HQ,
                            Rows<const T> grad_out, const Gradients<T>& grads) {
  const std::int64_t D = shape.head_dim, width = shape.kv_heads * D;
  // gK and gV of path rows, then own rows, [P + T, J, D].
  std::vector<double> grad_k((shape.path_rows + shape.own_rows) * width), grad_v(grad_k.size());
  for (std::int64_t i = 0; i < shape.query_rows; ++i) {
    const std::vector<Seen> keys = seen_by(shape, i);
    for (std::int64_t h = 0; h < shape.heads; ++h) {
      const std::int64_t j = h / (shape.heads / shape.kv_heads);
      const std::vector<double> scores = scores_of(shape, in, keys, i, h);
      const T *q = at(in.q, i, h, shape), *g = at(grad_out, i, h, shape);
      const double row_dot = dot(g, at(out, i, h, shape), D);
      std::vector<double> grad_q(D);
      for (std::size_t s = 0; s < keys.size(); ++s) {
        const std::int64_t row = keys[s].row, place = (keys[s].own ? shape.path_rows + row : row) * width + j * D;
        const T* k = at(keys[s].own ? in.own_k : in.path_k, row, j, shape);
        const T* v = at(keys[s].own ? in.own_v : in.path_v, row, j, shape);
        const double weight = std::exp(scores[s] - static_cast<double>(lse_HQ[h * shape.query_rows + i]));
        const double slope = shape.scale * weight * (dot(g, v, D) - row_dot);
        for (std::int64_t d = 0; d < D; ++d) {
          grad_q[d] += slope * static_cast<double>(k[d]);
          grad_k[place + d] += slope * static_cast<double>(q[d]);
          grad_v[place + d] += weight * static_cast<double>(g[d]);
        }
      }
      for (std::int64_t d = 0; d < D; ++d) at(grads.q, i, h, shape)[d] = round_to<T>(grad_q[d]);
    }
  }
  using A = accumulator_t<T>;
  for (std::int64_t row = 0; row < shape.path_rows + shape.own_rows; ++row) {
    const bool own = row >= shape.path_rows;
    A* k = at(own ? grads.own_k : grads.path_k, own ? row - shape.path_rows : row, 0, shape);
    A* v = at(own ? grads.own_v : grads.path_v, own ? row - shape.path_rows : row, 0, shape);
    for (std::int64_t d = 0; d < width; ++d) {
      k[d] += static_cast<A>(grad_k[row * width + d]);
      v[d] += static_cast<A>(grad_v[row * width + d]);
    }
  }
}

#define ESPALIER_INSTANTIATE(T)                                                                                   \
  template void reference_forward<T>(const Shape&, const Inputs<T>&, Rows<T>, accumulator_t<T>*);                 \
  template void add_reference_backward<T>(const Shape&, const Inputs<T>&, Rows<const T>, const accumulator_t<T>*, \
                                          Rows<const T>, const Gradients<T>&)
ESPALIER_INSTANTIATE(float);
ESPALIER_INSTANTIATE(double);
ESPALIER_INSTANTIATE(bfloat16);
#undef ESPALIER_INSTANTIATE

}  // namespace espalier::attention
