// References of the tests: random problems, and attention written as plainly as it can be in any number type.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <ostream>
#include <random>
#include <type_traits>
#include <vector>

#include "espalier/ops/cpu/attention/attention.h"

namespace espalier::attention_test {

struct Sizes {
  int own = 0, path = 0, heads = 1, kv_heads = 1, head_dim = 8, value_dim = 0;

  int values() const { return value_dim > 0 ? value_dim : head_dim; }  // heads of v, out and their gradients
};

// Operands as float64 numbers, rounded to the type under test, rows end to end ([rows, heads * D]).
struct Problem {
  std::uint64_t seed = 0;
  Sizes size;
  double scale = 1;
  std::vector<std::int32_t> subtree_end, query_row;  // query_row always explicit here
  bool pass_query_row = true;                        // false: query_row is 0, 1, 2, ... and null is passed
  int window = 0;                                    // 0: none
  std::vector<std::int32_t> depth;                   // of own rows, where there is a window
  std::vector<double> q, own_k, own_v, path_k, path_v, grad_out;

  int queries() const { return static_cast<int>(query_row.size()); }
  // Key `key` of the path's rows and then the own ones.
  bool sees(int query, int key) const {
    const int row = query_row[query], own = key - size.path;
    const bool on_the_way = own < 0 || (own <= row && row < subtree_end[own]);
    return on_the_way && (window == 0 || depth[row] - (own < 0 ? key : depth[own]) < window);
  }
  int pairs() const {
    int n = 0;
    for (int i = 0; i < queries(); ++i)
      for (int j = 0; j < size.path + size.own; ++j) n += sees(i, j);
    return n;
  }
};

// The same rows, each of which sees at most `window` of those that it saw.
inline Problem with_window(Problem p, int window) {
  p.window = window;
  p.depth.assign(static_cast<std::size_t>(p.size.own), p.size.path);
  for (int above = 0; above < p.size.own; ++above)
    for (int row = above + 1; row < p.subtree_end[above]; ++row) ++p.depth[row];
  return p;
}

inline std::ostream& operator<<(std::ostream& to, const Problem& p) {
  return to << "seed " << p.seed << ": T=" << p.size.own << " Q=" << p.queries() << " P=" << p.size.path
            << " H=" << p.size.heads << " J=" << p.size.kv_heads << " D=" << p.size.head_dim
            << " Dv=" << p.size.values() << " W=" << p.window;
}

// Segments in depth-first order: each one's subtree ends where its last descendant ends.
inline std::vector<std::int32_t> random_tree(int rows, std::mt19937_64& random, int longest) {
  std::vector<std::int32_t> ends(rows);
  const auto grow = [&](const auto& self, int begin, int end) -> void {
    while (begin < end) {
      const int subtree = 1 + static_cast<int>(random() % static_cast<unsigned>(end - begin));
      const int own = std::min<int>(subtree, 1 + static_cast<int>(random() % static_cast<unsigned>(longest)));
      for (int j = begin; j < begin + own; ++j) ends[j] = begin + subtree;
      self(self, begin + own, begin + subtree);
      begin += subtree;
    }
  };
  grow(grow, 0, rows);
  return ends;
}

template <class T>
double rounded(double x) {
  if constexpr (std::is_same_v<T, bfloat16>)
    return static_cast<double>(bfloat16(static_cast<float>(x)));
  else
    return static_cast<double>(static_cast<T>(x));
}

enum class Rows { all, some_repeated };

// Operands of a problem whose rows and tree are set.
template <class T>
void fill_operands(Problem& p, std::mt19937_64& random, double magnitude = 1) {
  std::normal_distribution<double> normal;
  const Sizes& size = p.size;
  p.scale = 1 / std::sqrt(static_cast<double>(size.head_dim));
  const auto fill = [&](std::vector<double>& x, int rows, int heads, int dim, double by) {
    x.resize(static_cast<std::size_t>(rows) * heads * dim);
    for (double& v : x) v = rounded<T>(by * normal(random));
  };
  fill(p.q, p.queries(), size.heads, size.head_dim, magnitude);
  fill(p.own_k, size.own, size.kv_heads, size.head_dim, 1);
  fill(p.own_v, size.own, size.kv_heads, size.values(), 1);
  fill(p.path_k, size.path, size.kv_heads, size.head_dim, 1);
  fill(p.path_v, size.path, size.kv_heads, size.values(), 1);
  fill(p.grad_out, p.queries(), size.heads, size.values(), 1);
}

template <class T>
Problem random_problem(std::uint64_t seed, Sizes size, Rows which, double magnitude = 1, bool causal = false) {
  std::mt19937_64 random(seed);
  Problem p;
  p.seed = seed;
  p.size = size;
  p.subtree_end = causal ? std::vector<std::int32_t>(size.own, size.own)
                         : random_tree(size.own, random, 1 + static_cast<int>(random() % 90));
  p.pass_query_row = which == Rows::some_repeated;
  for (int row = 0; row < size.own; ++row) {
    const int times = which == Rows::all ? 1 : static_cast<int>(random() % 4) - 1;
    for (int n = 0; n < times; ++n) p.query_row.push_back(row);
  }
  fill_operands<T>(p, random, magnitude);
  return p;
}

// As generation asks: `length` own rows a slot, one query at a random place of each slot but every `idle`th.
template <class T>
Problem slots_problem(std::uint64_t seed, Sizes size, int length, int idle) {
  std::mt19937_64 random(seed);
  Problem p;
  p.seed = seed;
  p.size = size;
  for (int row = 0; row < size.own; ++row) p.subtree_end.push_back((row / length + 1) * length);
  for (int slot = 0; slot < size.own / length; ++slot)
    if (slot % idle != idle - 1)
      p.query_row.push_back(slot * length + static_cast<int>(random() % static_cast<unsigned>(length)));
  fill_operands<T>(p, random);
  return p;
}

// Results, laid out as the problem's operands; lse [H, Q].
template <class N>
struct Results {
  std::vector<N> out, lse, q, own_k, own_v, path_k, path_v;
};

// Attention with every number and sum of type N: scores, softmax and products row by row. Factors::as_bfloat16: the
// weights P and slopes dS are rounded to bfloat16 before they multiply, as code that multiplies bfloat16 has to.
enum class Factors { as_summed, as_bfloat16 };
template <class N>
class Plain {
 public:
  explicit Plain(const Problem& p, Factors factors = Factors::as_summed)
      : p_(p), D_(p.size.head_dim), Dv_(p.size.values()), factors_(factors) {}

  void forward(Results<N>& r) const {
    r.out.assign(p_.grad_out.size(), N(0));
    r.lse.assign(static_cast<std::size_t>(p_.size.heads) * p_.queries(), N(0));
    each_row([&](int i, int h, std::vector<N>& s) {
      N top = -std::numeric_limits<N>::infinity(), total = 0;
      for (const N x : s) top = std::max(top, x);
      for (const N x : s) total += visible(i, x) ? std::exp(x - top) : N(0);
      r.lse[static_cast<std::size_t>(h) * p_.queries() + i] = top + std::log(total);
      for (int d = 0; d < Dv_; ++d) {
        N sum = 0;
        for (int j = 0; j < keys(); ++j)
          if (visible(i, s[j])) sum += factor(std::exp(s[j] - top)) * N(value(p_.path_v, p_.own_v, j, h, d, Dv_));
        r.out[value_row(i, h) + d] = sum / total;
      }
    });
  }

  // The sum of the sizes of each result's terms: every product and difference of backward taken absolutely.
  // A rounding of each term in its type moves the result by up to that type's unit times this.
  Results<N> magnitudes(const Results<N>& from) const {
    Results<N> m;
    m.out.assign(p_.grad_out.size(), N(0)), m.q.assign(p_.q.size(), N(0));
    m.own_k.assign(p_.own_k.size(), N(0)), m.own_v.assign(p_.own_v.size(), N(0));
    m.path_k.assign(p_.path_k.size(), N(0)), m.path_v.assign(p_.path_v.size(), N(0));
    for (const N l : from.lse) m.lse.push_back(std::fabs(l));
    each_row([&](int i, int h, std::vector<N>& s) {
      N dots = 0;
      for (int d = 0; d < Dv_; ++d)
        dots += std::fabs(N(p_.grad_out[value_row(i, h) + d]) * from.out[value_row(i, h) + d]);
      const N lse = from.lse[static_cast<std::size_t>(h) * p_.queries() + i];
      for (int j = 0; j < keys(); ++j) {
        if (!visible(i, s[j])) continue;
        // A weight is as uncertain as its exponent: score and lse are rounded numbers of their size.
        const N weight = std::exp(s[j] - lse) * (1 + std::fabs(s[j]) + std::fabs(lse));
        N slope = dots;
        for (int d = 0; d < Dv_; ++d)
          slope += std::fabs(N(p_.grad_out[value_row(i, h) + d]) * N(value(p_.path_v, p_.own_v, j, h, d, Dv_)));
        slope *= weight * std::fabs(N(p_.scale));
        for (int d = 0; d < D_; ++d) {
          m.q[row(i, h) + d] += slope * std::fabs(N(value(p_.path_k, p_.own_k, j, h, d, D_)));
          value(m.path_k, m.own_k, j, h, d, D_) += slope * std::fabs(N(p_.q[row(i, h) + d]));
        }
        for (int d = 0; d < Dv_; ++d) {
          m.out[value_row(i, h) + d] += weight * std::fabs(N(value(p_.path_v, p_.own_v, j, h, d, Dv_)));
          value(m.path_v, m.own_v, j, h, d, Dv_) += weight * std::fabs(N(p_.grad_out[value_row(i, h) + d]));
        }
      }
    });
    return m;
  }

  // From r.out and r.lse; K and V gradients are added to what r holds.
  void backward(Results<N>& r) const {
    r.q.assign(p_.q.size(), N(0));
    each_row([&](int i, int h, std::vector<N>& s) {
      N dots = 0;
      for (int d = 0; d < Dv_; ++d) dots += N(p_.grad_out[value_row(i, h) + d]) * r.out[value_row(i, h) + d];
      for (int j = 0; j < keys(); ++j) {
        if (!visible(i, s[j])) continue;
        const N weight = std::exp(s[j] - r.lse[static_cast<std::size_t>(h) * p_.queries() + i]);
        N slope = 0;
        for (int d = 0; d < Dv_; ++d)
          slope += N(p_.grad_out[value_row(i, h) + d]) * N(value(p_.path_v, p_.own_v, j, h, d, Dv_));
        slope = factor(weight * (slope - dots)) * N(p_.scale);
        for (int d = 0; d < D_; ++d) {
          r.q[row(i, h) + d] += slope * N(value(p_.path_k, p_.own_k, j, h, d, D_));
          value(r.path_k, r.own_k, j, h, d, D_) += slope * N(p_.q[row(i, h) + d]);
        }
        for (int d = 0; d < Dv_; ++d)
          value(r.path_v, r.own_v, j, h, d, Dv_) += factor(weight) * N(p_.grad_out[value_row(i, h) + d]);
      }
    });
  }

 private:
  int keys() const { return p_.size.path + p_.size.own; }
  static bool visible(int, N score) { return score != -std::numeric_limits<N>::infinity(); }
  std::size_t row(int i, int h) const { return (static_cast<std::size_t>(i) * p_.size.heads + h) * D_; }
  std::size_t value_row(int i, int h) const { return (static_cast<std::size_t>(i) * p_.size.heads + h) * Dv_; }
  template <class V>
  auto& value(V& path, V& own, int j, int h, int d, int dim) const {
    const int kv = h / (p_.size.heads / p_.size.kv_heads);
    const auto at = [&](int r) { return (static_cast<std::size_t>(r) * p_.size.kv_heads + kv) * dim + d; };
    return j < p_.size.path ? path[at(j)] : own[at(j - p_.size.path)];
  }
  template <class Body>
  void each_row(const Body& body) const {
    std::vector<N> s(keys());
    for (int i = 0; i < p_.queries(); ++i)
      for (int h = 0; h < p_.size.heads; ++h) {
        for (int j = 0; j < keys(); ++j) {
          N sum = 0;
          for (int d = 0; d < D_; ++d) sum += N(p_.q[row(i, h) + d]) * N(value(p_.path_k, p_.own_k, j, h, d, D_));
          s[j] = p_.sees(i, j) ? sum * N(p_.scale) : -std::numeric_limits<N>::infinity();
        }
        body(i, h, s);
      }
  }

  N factor(N x) const { return factors_ == Factors::as_bfloat16 ? N(rounded<bfloat16>(static_cast<double>(x))) : x; }

  const Problem& p_;
  int D_, Dv_;
  Factors factors_;
};

// An operand in memory: rows further apart than they are wide, and a guard value wherever no row stands.
template <class T>
class Operand {
 public:
  static constexpr double kGuard = 1280;  // exact in every type
  Operand(const std::vector<double>& values, int width, int gap) : width_(width), stride_(width + gap) {
    const std::size_t rows = width ? values.size() / width : 0;
    data_.assign(rows * stride_ + 64, T(static_cast<float>(kGuard)));
    for (std::size_t i = 0; i < values.size(); ++i) at(i) = round(values[i]);
  }
  attention::Rows<T> rows() { return {data_.data() + 32, stride_}; }
  attention::Rows<const T> const_rows() const { return {data_.data() + 32, stride_}; }
  std::vector<double> values(std::size_t n) {
    std::vector<double> x(n);
    for (std::size_t i = 0; i < n; ++i) x[i] = static_cast<double>(at(i));
    return x;
  }
  bool guards_untouched(std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) at(i) = T(static_cast<float>(kGuard));
    return std::all_of(data_.begin(), data_.end(), [](const T& v) { return static_cast<double>(v) == kGuard; });
  }

 private:
  static T round(double x) {
    if constexpr (std::is_same_v<T, bfloat16>)
      return bfloat16(static_cast<float>(x));
    else
      return static_cast<T>(x);
  }
  T& at(std::size_t i) { return data_[32 + i / width_ * stride_ + i % width_]; }

  std::int64_t width_, stride_;
  std::vector<T> data_;
};

}  // namespace espalier::attention_test
