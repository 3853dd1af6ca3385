// The gated delta rule on a CPU: a thread takes a key head with its value heads and their channels, which share nothing
// with those of other key heads, and goes through all runs in blocks of rows.
#include <algorithm>
#include <cmath>
#include <vector>

#include "espalier/base/instruction_set.h"
#include "espalier/ops/cpu/delta_rule_ranges.h"
#include "espalier/ops/cpu/dispatch.h"
#include "espalier/ops/cpu/operations.h"

namespace espalier::cpu {
namespace {

constexpr std::int64_t kBlockRows = 32;
constexpr double kEps = 1e-6;  // of the norm of q and k: added to the sum of squares

template <class A>
DeltaRuleRanges<A> ranges() {
  return function_for_set(baseline::delta_rule_ranges<A>, avx2::delta_rule_ranges<A>, avx512::delta_rule_ranges<A>)();
}

template <class A>
A sigmoid(A x) {
  return 1 / (1 + std::exp(-x));
}
// log(1 + e^x).
template <class A>
A softplus(A x) {
  return x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x));
}

// A run as one key head sees it.
template <class T>
struct Run {
  using A = accumulator_t<T>;
  std::int64_t begin, end;
  const A* start;
  A *end_state, *grad_start;
  const A* grad_end;

  explicit Run(const StateRun& run)
      : begin(run.begin),
        end(run.end),
        start(pointer<A>(run.start_N)),
        end_state(pointer<A>(run.end_N)),
        grad_start(pointer<A>(run.grad_start_N)),
        grad_end(pointer<A>(run.grad_end_N)) {}
};

template <class T>
class KeyHead {
 public:
  using A = accumulator_t<T>;

  KeyHead(const DeltaRuleProblem& problem, std::int64_t key_head)
      : s_(problem.shape),
        each_(s_.value_heads / s_.key_heads),
        first_value_head_(key_head * each_),
        columns_(s_.columns(key_head)),
        width_(2 * s_.key_dim + each_ * s_.value_dim),
        projected_(pointer<T>(problem.projected_TW)),
        conv_(pointer<T>(problem.conv_CK)),
        a_log_(pointer<T>(problem.a_log_H)),
        dt_bias_(pointer<T>(problem.dt_bias_H)),
        ranges_(ranges<A>()) {
    const std::int64_t key = key_head * s_.key_dim, keys = s_.key_heads * s_.key_dim;
    for (std::int64_t i = 0; i < s_.key_dim; ++i) add_channel(key + i, columns_.q + i);
    for (std::int64_t i = 0; i < s_.key_dim; ++i) add_channel(keys + key + i, columns_.k + i);
    for (std::int64_t i = 0; i < each_ * s_.value_dim; ++i)
      add_channel(2 * keys + key_head * each_ * s_.value_dim + i, columns_.v + i);
    const auto rows = static_cast<std::size_t>(kBlockRows);
    mixed_.resize(rows * size(width_));
    inverse_.resize(2 * rows);
    q_.resize(rows * size(s_.key_dim)), k_ = q_;
    v_.resize(rows * size(each_ * s_.value_dim));
    decay_.resize(rows * size(each_)), beta_ = log_decay_ = decay_;
    state_.resize(size(each_ * matrix()));
  }

  void forward(const Run<T>& run, T* o) {
    load_state(run);
    std::vector<A> out(size(kBlockRows * s_.value_dim));
    for (std::int64_t begin = run.begin; begin < run.end; begin += kBlockRows) {
      const std::int64_t rows = std::min(kBlockRows, run.end - begin);
      compute_block(run, begin, rows);
      for (std::int64_t h = 0; h < each_; ++h) {
        ranges_.forward(head(h, rows), 0, rows, state(h), o == nullptr ? nullptr : out.data());
        for (std::int64_t r = 0; r < rows && o != nullptr; ++r)
          for (std::int64_t j = 0; j < s_.value_dim; ++j)
            o[((begin + r) * s_.value_heads + first_value_head_ + h) * s_.value_dim + j] =
                static_cast<T>(out[size(r * s_.value_dim + j)]);
      }
    }
    if (run.end_state != nullptr) store_state(run);
  }

  void add_backward(const Run<T>& run, const T* grad_o, const DeltaRuleGradients& gradients);

 private:
  static std::size_t size(std::int64_t count) { return static_cast<std::size_t>(count); }
  std::int64_t matrix() const { return s_.key_dim * s_.value_dim; }
  A* state(std::int64_t h) { return state_.data() + h * matrix(); }
  void add_channel(std::int64_t channel, std::int64_t column) {
    channel_.push_back(channel);
    column_.push_back(column);
  }

  // The convolution's input of a channel; rows before the run are the start's.
  A input(const Run<T>& run, std::int64_t row, std::int64_t c) const {
    if (row >= run.begin) return static_cast<A>(projected_[row * s_.projected() + column_[size(c)]]);
    return run.start == nullptr ? A(0) : run.start[tail(row - run.begin, c)];
  }
  // Where a state has the input of a channel, so many rows (-1 .. 1 - K) before what follows.
  std::int64_t tail(std::int64_t rows_before, std::int64_t c) const {
    return s_.matrix() + (s_.kernel - 1 + rows_before) * s_.channels() + channel_[size(c)];
  }

  void load_state(const Run<T>& run) {
    if (run.start == nullptr)
      std::fill(state_.begin(), state_.end(), A(0));
    else
      std::copy_n(run.start + first_value_head_ * matrix(), state_.size(), state_.begin());
  }
  // The tail first: the end may be the start, and its inputs move towards the front.
  void store_state(const Run<T>& run) {
    for (std::int64_t before = 1 - s_.kernel; before < 0; ++before)
      for (std::int64_t c = 0; c < width_; ++c) run.end_state[tail(before, c)] = input(run, run.end + before, c);
    std::copy(state_.begin(), state_.end(), run.end_state + first_value_head_ * matrix());
  }

  HeadRows<A> head(std::int64_t h, std::int64_t rows) const {
    return {rows,
            s_.key_dim,
            s_.value_dim,
            q_.data(),
            k_.data(),
            v_.data() + h * kBlockRows * s_.value_dim,
            decay_.data() + h * kBlockRows,
            beta_.data() + h * kBlockRows};
  }

  // What the recurrence reads of the rows.
  void compute_block(const Run<T>& run, std::int64_t begin, std::int64_t rows) {
    for (std::int64_t r = 0; r < rows; ++r) {
      A* const mixed = mixed_.data() + r * width_;
      for (std::int64_t c = 0; c < width_; ++c) {
        const T* const weight = conv_ + channel_[size(c)] * s_.kernel;
        A sum = 0;
        for (std::int64_t j = 0; j < s_.kernel; ++j)
          sum += static_cast<A>(weight[j]) * input(run, begin + r - s_.kernel + 1 + j, c);
        mixed[c] = sum;
      }
      inverse_[size(2 * r)] =
          normalised(mixed, std::sqrt(A(1) / static_cast<A>(s_.key_dim)), q_.data() + r * s_.key_dim);
      inverse_[size(2 * r + 1)] = normalised(mixed + s_.key_dim, A(1), k_.data() + r * s_.key_dim);
      for (std::int64_t i = 0; i < each_ * s_.value_dim; ++i) {
        const A x = mixed[2 * s_.key_dim + i];
        v_[size((i / s_.value_dim * kBlockRows + r) * s_.value_dim + i % s_.value_dim)] = x * sigmoid(x);
      }
      const T* const row = projected_ + (begin + r) * s_.projected();
      for (std::int64_t h = 0; h < each_; ++h) {
        const std::int64_t at = h * kBlockRows + r;
        log_decay_[size(at)] = -std::exp(a_log(h)) * softplus(before_softplus(row, h));
        decay_[size(at)] = std::exp(log_decay_[size(at)]);
        beta_[size(at)] = sigmoid(static_cast<A>(row[columns_.b + h]));
      }
    }
  }
  A a_log(std::int64_t h) const { return static_cast<A>(a_log_[first_value_head_ + h]); }
  A before_softplus(const T* row, std::int64_t h) const {
    return static_cast<A>(row[columns_.a + h]) + static_cast<A>(dt_bias_[first_value_head_ + h]);
  }

  // out = scale silu(x) / |silu(x)|; returns 1 / |silu(x)|.
  A normalised(const A* x, A scale, A* out) const {
    A squares = 0;
    for (std::int64_t i = 0; i < s_.key_dim; ++i) out[i] = x[i] * sigmoid(x[i]), squares += out[i] * out[i];
    const A inverse = 1 / std::sqrt(squares + static_cast<A>(kEps));
    for (std::int64_t i = 0; i < s_.key_dim; ++i) out[i] *= inverse * scale;
    return inverse;
  }
  // grad = gradient of x from that of out, in place.
  void normalised_backward(const A* x, const A* out, A scale, A inverse, A* grad) const {
    A along = 0;
    for (std::int64_t i = 0; i < s_.key_dim; ++i) along += grad[i] * out[i];
    for (std::int64_t i = 0; i < s_.key_dim; ++i)
      grad[i] = silu_backward(x[i], inverse * (grad[i] * scale - out[i] / scale * along));
  }
  static A silu_backward(A x, A grad) {
    const A s = sigmoid(x);
    return grad * s * (1 + x * (1 - s));
  }

  const DeltaRuleShape& s_;
  std::int64_t each_, first_value_head_;
  DeltaRuleShape::Columns columns_;
  std::int64_t width_;                          // channels here: q, k, v
  std::vector<std::int64_t> channel_, column_;  // of the convolution; of a projected row
  const T *projected_, *conv_, *a_log_, *dt_bias_;
  DeltaRuleRanges<A> ranges_;
  std::vector<A> mixed_, inverse_, q_, k_, v_;  // of a block: the convolution's result; 1 / norms
  std::vector<A> decay_, beta_, log_decay_;     // [heads, rows of a block]
  std::vector<A> state_;
};

template <class T>
void KeyHead<T>::add_backward(const Run<T>& run, const T* grad_o, const DeltaRuleGradients& gradients) {
  const std::int64_t dk = s_.key_dim, dv = s_.value_dim, K = s_.kernel, rows_of_run = run.end - run.begin;
  const std::int64_t blocks = (rows_of_run + kBlockRows - 1) / kBlockRows;
  const A scale = std::sqrt(A(1) / static_cast<A>(dk));
  const auto rows_of = [&](std::int64_t b) { return std::min(kBlockRows, rows_of_run - b * kBlockRows); };
  std::vector<A> starts;  // of the blocks, [blocks, heads, dk, dv]
  load_state(run);
  for (std::int64_t b = 0; b < blocks; ++b) {
    starts.insert(starts.end(), state_.begin(), state_.end());
    if (b + 1 == blocks) break;
    compute_block(run, run.begin + b * kBlockRows, rows_of(b));
    for (std::int64_t h = 0; h < each_; ++h) ranges_.forward(head(h, rows_of(b)), 0, rows_of(b), state(h), nullptr);
  }
  std::vector<A> grad(state_.size(), A(0));
  if (run.grad_end != nullptr) std::copy_n(run.grad_end + first_value_head_ * matrix(), grad.size(), grad.begin());

  std::vector<A> inside(size((kBlockRows + 1) * matrix())), room(size(3 * dv)), grad_q(size(dk)), grad_k(size(dk)),
      grad_v(size(dv)), of_o(size(dv));
  // Of the convolution's results, for the block and the K - 1 rows behind it.
  std::vector<A> grad_mixed(size((kBlockRows + K - 1) * width_), A(0));
  std::vector<double> conv_sums(size(width_ * K), 0), a_log_sums(size(each_), 0), dt_sums(size(each_), 0);
  T* const grad_projected = pointer<T>(gradients.projected_TW);
  // What comes to the input of `row` by the rows of which grad_mixed knows, whose first one is `first`, and by the end.
  const auto grad_input = [&](std::int64_t row, std::int64_t first, std::int64_t c) {
    A sum = run.grad_end != nullptr && row > run.end - K ? run.grad_end[tail(row - run.end, c)] : A(0);
    const T* const weight = conv_ + channel_[size(c)] * K;
    for (std::int64_t j = std::max<std::int64_t>(0, first - row); j < K && row + j < run.end; ++j)
      sum += static_cast<A>(weight[K - 1 - j]) * grad_mixed[size((row + j - first) * width_ + c)];
    return sum;
  };
  for (std::int64_t b = blocks; b-- > 0;) {
    const std::int64_t rows = rows_of(b), first = run.begin + b * kBlockRows;
    compute_block(run, first, rows);
    std::copy_n(grad_mixed.begin(), (K - 1) * width_, grad_mixed.begin() + rows * width_);
    std::fill_n(grad_mixed.begin(), rows * width_, A(0));
    for (std::int64_t h = 0; h < each_; ++h) {
      const HeadRows<A> of_head = head(h, rows);
      std::copy_n(starts.begin() + (b * each_ + h) * matrix(), matrix(), inside.begin());
      for (std::int64_t r = 0; r < rows; ++r) {
        A* const next = inside.data() + (r + 1) * matrix();
        std::copy_n(inside.data() + r * matrix(), matrix(), next);
        ranges_.forward(of_head, r, r + 1, next, nullptr);
      }
      for (std::int64_t r = rows; r-- > 0;) {
        const std::int64_t row = first + r, value_head = first_value_head_ + h, at = h * kBlockRows + r;
        for (std::int64_t j = 0; j < dv; ++j)
          of_o[size(j)] = static_cast<A>(grad_o[(row * s_.value_heads + value_head) * dv + j]);
        A grad_log_decay = 0, grad_beta = 0;
        ranges_.backward(of_head, r, inside.data() + r * matrix(), inside.data() + (r + 1) * matrix(), of_o.data(),
                         grad.data() + h * matrix(), grad_q.data(), grad_k.data(), grad_v.data(), &grad_log_decay,
                         &grad_beta, room.data());
        A* const mixed = grad_mixed.data() + r * width_;
        for (std::int64_t i = 0; i < dk; ++i) mixed[i] += grad_q[size(i)], mixed[dk + i] += grad_k[size(i)];
        for (std::int64_t j = 0; j < dv; ++j)
          mixed[2 * dk + h * dv + j] = silu_backward(mixed_[size(r * width_ + 2 * dk + h * dv + j)], grad_v[size(j)]);
        const A beta = beta_[size(at)];
        T* const of_row = grad_projected + row * s_.projected();
        of_row[columns_.b + h] = static_cast<T>(grad_beta * beta * (1 - beta));
        const A grad_a =
            -std::exp(a_log(h)) * grad_log_decay * sigmoid(before_softplus(projected_ + row * s_.projected(), h));
        of_row[columns_.a + h] = static_cast<T>(grad_a);
        dt_sums[size(h)] += static_cast<double>(grad_a);
        a_log_sums[size(h)] += static_cast<double>(grad_log_decay) * static_cast<double>(log_decay_[size(at)]);
      }
    }
    for (std::int64_t r = 0; r < rows; ++r) {
      A* const mixed = grad_mixed.data() + r * width_;
      const A* const x = mixed_.data() + r * width_;
      normalised_backward(x, q_.data() + r * dk, scale, inverse_[size(2 * r)], mixed);
      normalised_backward(x + dk, k_.data() + r * dk, A(1), inverse_[size(2 * r + 1)], mixed + dk);
      for (std::int64_t c = 0; c < width_; ++c)
        for (std::int64_t j = 0; j < K; ++j)
          conv_sums[size(c * K + j)] +=
              static_cast<double>(mixed[c]) * static_cast<double>(input(run, first + r - K + 1 + j, c));
    }
    for (std::int64_t r = 0; r < rows; ++r)
      for (std::int64_t c = 0; c < width_; ++c)
        grad_projected[(first + r) * s_.projected() + column_[size(c)]] =
            static_cast<T>(grad_input(first + r, first, c));
  }
  if (run.grad_start != nullptr) {
    for (std::int64_t i = 0; i < each_ * matrix(); ++i)
      run.grad_start[first_value_head_ * matrix() + i] += grad[size(i)];
    for (std::int64_t before = 1 - K; before < 0; ++before)
      for (std::int64_t c = 0; c < width_; ++c)
        run.grad_start[tail(before, c)] += grad_input(run.begin + before, run.begin, c);
  }
  const auto add = [](const at::Tensor& to, std::int64_t index, double value) {
    if (to.defined()) pointer<A>(to)[index] += static_cast<A>(value);
  };
  for (std::int64_t h = 0; h < each_; ++h) {
    add(gradients.a_log_H, first_value_head_ + h, a_log_sums[size(h)]);
    add(gradients.dt_bias_H, first_value_head_ + h, dt_sums[size(h)]);
  }
  for (std::int64_t c = 0; c < width_; ++c)
    for (std::int64_t j = 0; j < K; ++j) add(gradients.conv_CK, channel_[size(c)] * K + j, conv_sums[size(c * K + j)]);
}

void delta_rule(const DeltaRuleProblem& problem, const at::Tensor& o) {
  dispatch(problem.projected_TW.scalar_type(), [&]<class T>() {
#pragma omp parallel for schedule(static)
    for (std::int64_t g = 0; g < problem.shape.key_heads; ++g) {
      KeyHead<T> head(problem, g);
      for (const StateRun& run : problem.runs) head.forward(Run<T>(run), pointer<T>(o));
    }
  });
}

void add_delta_rule_backward(const DeltaRuleProblem& problem, const at::Tensor& grad_o,
                             const DeltaRuleGradients& gradients) {
  dispatch(grad_o.scalar_type(), [&]<class T>() {
#pragma omp parallel for schedule(static)
    for (std::int64_t g = 0; g < problem.shape.key_heads; ++g) {
      KeyHead<T> head(problem, g);
      for (auto run = problem.runs.rbegin(); run != problem.runs.rend(); ++run)
        head.add_backward(Run<T>(*run), pointer<T>(grad_o), gradients);
    }
  });
}

// Calls body(row, value head, its first column of z).
template <class Body>
void for_each_head(const DeltaRuleShape& s, std::int64_t rows, Body body) {
  const std::int64_t each = s.value_heads / s.key_heads;
#pragma omp parallel for schedule(static)
  for (std::int64_t head = 0; head < s.value_heads; ++head)
    for (std::int64_t row = 0; row < rows; ++row) body(row, head, s.columns(head / each).z + head % each * s.value_dim);
}

template <class A, class T>
A inverse_root_mean(const T* o, std::int64_t width, double eps) {
  A squares = 0;
  for (std::int64_t j = 0; j < width; ++j) squares += static_cast<A>(o[j]) * static_cast<A>(o[j]);
  return 1 / std::sqrt(squares / static_cast<A>(width) + static_cast<A>(eps));
}

void gated_norm(const GatedNormProblem& p, const at::Tensor& y) {
  dispatch(y.scalar_type(), [&]<class T>() {
    using A = accumulator_t<T>;
    const DeltaRuleShape& s = p.shape;
    const T* const weight = pointer<T>(p.weight_D);
    for_each_head(s, y.size(0), [&](std::int64_t row, std::int64_t head, std::int64_t column) {
      const std::int64_t at = row * s.value_width() + head * s.value_dim;
      const T *const o = pointer<T>(p.o_TV) + at, *const z = pointer<T>(p.projected_TW) + row * s.projected() + column;
      T* const out = pointer<T>(y) + at;
      const A inverse = inverse_root_mean<A>(o, s.value_dim, p.eps);
      for (std::int64_t j = 0; j < s.value_dim; ++j) {
        const A gate = static_cast<A>(z[j]);
        out[j] = static_cast<T>(static_cast<A>(weight[j]) * static_cast<A>(o[j]) * inverse * gate * sigmoid(gate));
      }
    });
  });
}

void add_gated_norm_backward(const GatedNormProblem& p, const at::Tensor& grad_y, const at::Tensor& grad_o,
                             const at::Tensor& grad_projected, const at::Tensor& grad_weight) {
  dispatch(grad_y.scalar_type(), [&]<class T>() {
    using A = accumulator_t<T>;
    const DeltaRuleShape& s = p.shape;
    const T* const weight = pointer<T>(p.weight_D);
    std::vector<double> sums(static_cast<std::size_t>(s.value_width()), 0);  // of each head
    for_each_head(s, grad_y.size(0), [&](std::int64_t row, std::int64_t head, std::int64_t column) {
      const std::int64_t at = row * s.value_width() + head * s.value_dim, first = row * s.projected() + column;
      const T *const o = pointer<T>(p.o_TV) + at, *const z = pointer<T>(p.projected_TW) + first;
      const T* const grad = pointer<T>(grad_y) + at;
      T *const to = pointer<T>(grad_o) + at, *const to_z = pointer<T>(grad_projected) + first;
      double* const sum = sums.data() + head * s.value_dim;
      const A inverse = inverse_root_mean<A>(o, s.value_dim, p.eps);
      const auto normed = [&](std::int64_t j) { return static_cast<A>(o[j]) * inverse; };
      const auto before = [&](std::int64_t j) {  // what comes to the normed row
        const A gate = static_cast<A>(z[j]);
        return static_cast<A>(grad[j]) * static_cast<A>(weight[j]) * gate * sigmoid(gate);
      };
      A along = 0;
      for (std::int64_t j = 0; j < s.value_dim; ++j) along += before(j) * normed(j);
      along /= static_cast<A>(s.value_dim);
      for (std::int64_t j = 0; j < s.value_dim; ++j) {
        const A gate = static_cast<A>(z[j]), g = sigmoid(gate), n = normed(j), of_y = static_cast<A>(grad[j]);
        const A of_o = inverse * (before(j) - n * along);
        sum[j] += static_cast<double>(of_y * n * gate * g);
        to_z[j] = static_cast<T>(of_y * static_cast<A>(weight[j]) * n * g * (1 + gate * (1 - g)));
        to[j] = static_cast<T>(of_o);
      }
    });
    if (!grad_weight.defined()) return;
    for (std::int64_t c = 0; c < s.value_width(); ++c)
      pointer<A>(grad_weight)[c % s.value_dim] += static_cast<A>(sums[static_cast<std::size_t>(c)]);
  });
}

// Calls body(element of y, its gate's element) for every element.
template <class Body>
void for_each_gate(std::int64_t rows, std::int64_t width, std::int64_t head_dim, Body body) {
#pragma omp parallel for schedule(static)
  for (std::int64_t row = 0; row < rows; ++row)
    for (std::int64_t c = 0; c < width; ++c)
      body(row * width + c, row * 2 * width + (c / head_dim * 2 + 1) * head_dim + c % head_dim);
}

void gate_heads(const at::Tensor& x, const at::Tensor& query_gate, std::int64_t head_dim, const at::Tensor& y) {
  dispatch(y.scalar_type(), [&]<class T>() {
    using A = accumulator_t<T>;
    const T *const in = pointer<T>(x), *const gate = pointer<T>(query_gate);
    T* const out = pointer<T>(y);
    for_each_gate(y.size(0), y.size(1), head_dim, [&](std::int64_t at, std::int64_t of_gate) {
      out[at] = static_cast<T>(static_cast<A>(in[at]) * sigmoid(static_cast<A>(gate[of_gate])));
    });
  });
}

void gate_heads_backward(const at::Tensor& x, const at::Tensor& query_gate, std::int64_t head_dim,
                         const at::Tensor& grad_y, const at::Tensor& grad_x, const at::Tensor& grad_query_gate) {
  dispatch(x.scalar_type(), [&]<class T>() {
    using A = accumulator_t<T>;
    const T *const in = pointer<T>(x), *const gate = pointer<T>(query_gate), *const grad = pointer<T>(grad_y);
    T *const to = pointer<T>(grad_x), *const to_gate = pointer<T>(grad_query_gate);
    for_each_gate(x.size(0), x.size(1), head_dim, [&](std::int64_t at, std::int64_t of_gate) {
      const A g = sigmoid(static_cast<A>(gate[of_gate])), of_y = static_cast<A>(grad[at]);
      to_gate[of_gate] = static_cast<T>(of_y * static_cast<A>(in[at]) * g * (1 - g));
      to[at] = static_cast<T>(of_y * g);
    });
  });
}

}  // namespace

DeltaRuleOperations delta_rule_operations() {
  return {delta_rule, add_delta_rule_backward, gated_norm, add_gated_norm_backward, gate_heads, gate_heads_backward};
}

}  // namespace espalier::cpu
