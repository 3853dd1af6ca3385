// The gated delta rule on a CPU: a thread takes a key head with its value heads and their channels, which share nothing
// with other key heads, and goes through all runs in blocks of rows.
#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "espalier/base/instruction_set.h"
#include "espalier/ops/cpu/channel_decay_ranges.h"
#include "espalier/ops/cpu/convolution_ranges.h"
#include "espalier/ops/cpu/delta_rule_ranges.h"
#include "espalier/ops/cpu/operations.h"
#include "espalier/ops/dispatch.h"

namespace espalier::cpu {
namespace {

constexpr std::int64_t kBlockRows = kStateBlockRows;

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

// Channels of the convolution that follow each other: of q, of k or of v.
struct Channels {
  std::int64_t channel, column, at, width;  // the first one; where it is in a projected row, and in a row here
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
        a_log_(pointer<T>(problem.a_log_H)),
        dt_bias_(pointer<T>(problem.dt_bias_H)),
        skip_(pointer<T>(problem.skip_H)),
        rule_(ESPALIER_FOR_SET(delta_rule_ranges<A>)()),
        channels_(ESPALIER_FOR_SET(channel_decay_ranges<A>)()),
        rows_(ESPALIER_FOR_SET(convolution_ranges<A>)()) {
    const std::int64_t dk = s_.key_dim, values = each_ * s_.value_dim;
    const RecurrenceShape::Channels channels = s_.channels(key_head);
    parts_ = {
        {{channels.q, columns_.q, 0, dk}, {channels.k, columns_.k, dk, dk}, {channels.v, columns_.v, 2 * dk, values}}};
    block_ = 1;
    for (const StateRun& run : problem.runs) block_ = std::max(block_, std::min(kBlockRows, run.end - run.begin));
    const auto rows = size(block_);
    line_.resize((rows + size(s_.kernel - 1)) * size(width_));
    mixed_.resize(rows * size(width_));
    weight_.resize(size(s_.kernel * width_));
    bias_.assign(size(width_), A(0));
    const T *const conv = pointer<T>(problem.conv_CK), *const bias = pointer<T>(problem.conv_bias_C);
    for (const Channels& part : parts_)
      for (std::int64_t c = 0; c < part.width; ++c) {
        if (bias != nullptr) bias_[size(part.at + c)] = static_cast<A>(bias[part.channel + c]);
        for (std::int64_t j = 0; j < s_.kernel; ++j)
          weight_[size(j * width_ + part.at + c)] = static_cast<A>(conv[(part.channel + c) * s_.kernel + j]);
      }
    inverse_.resize(2 * rows);
    q_.resize(rows * size(dk)), k_ = q_;
    v_.resize(rows * size(values));
    beta_.resize(rows * size(each_));
    decay_.resize(beta_.size() * size(decays())), log_decay_ = decay_;
    before_softplus_.resize(size(decays()));
    normed_ = !s_.mamba;
    state_.resize(size(each_ * matrix()));
    room_.resize(size(forward_room(dk, sizeof(A))));
  }

  void forward(const Run<T>& run, T* o) {
    load_state(run);
    out_.resize(size(o == nullptr ? 0 : block_ * s_.value_dim));
    for (std::int64_t begin = run.begin; begin < run.end; begin += kBlockRows) {
      const std::int64_t rows = std::min(kBlockRows, run.end - begin);
      compute_block(run, begin, rows);
      for (std::int64_t h = 0; h < each_; ++h) {
        forward_rows(head(h, rows), state(h), o == nullptr ? nullptr : out_.data());
        for (std::int64_t r = 0; r < rows && o != nullptr; ++r)
          for (std::int64_t j = 0; j < s_.value_dim; ++j)
            o[((begin + r) * s_.value_heads + first_value_head_ + h) * s_.value_dim + j] =
                static_cast<T>(out_[size(r * s_.value_dim + j)] + skip(h) * value(h, r)[j]);
      }
    }
    if (run.end_state != nullptr) store_state(run);
  }

  void add_backward(const Run<T>& run, const T* grad_o, const DeltaRuleGradients& gradients);

 private:
  static std::size_t size(std::int64_t count) { return static_cast<std::size_t>(count); }
  std::int64_t matrix() const { return s_.key_dim * s_.value_dim; }
  A* state(std::int64_t h) { return state_.data() + h * matrix(); }
  std::int64_t decays() const { return s_.decays_channels() ? s_.key_dim : 1; }  // of a value head
  void forward_rows(const HeadRows<A>& head, A* state, A* o) {
    (s_.decays_channels() ? channels_.forward : rule_.forward)(head, state, o, room_.data());
  }

  // The convolution's inputs of a row; inputs of rows before the run come from the start.
  void read_inputs(const Run<T>& run, std::int64_t row, A* to) const {
    for (const Channels& part : parts_) {
      if (row >= run.begin)
        std::transform(projected_ + row * s_.projected() + part.column,
                       projected_ + row * s_.projected() + part.column + part.width, to + part.at,
                       [](T x) { return static_cast<A>(x); });
      else if (run.start == nullptr)
        std::fill_n(to + part.at, part.width, A(0));
      else
        std::copy_n(run.start + tail(row - run.begin, part), part.width, to + part.at);
    }
  }
  // The place in a state of an earlier row's inputs; rows_before: -1 .. 1 - K, from the row that follows.
  std::int64_t tail(std::int64_t rows_before, const Channels& part) const {
    return s_.matrix() + (s_.kernel - 1 + rows_before) * s_.channels() + part.channel;
  }

  void load_state(const Run<T>& run) {
    if (run.start == nullptr)
      std::fill(state_.begin(), state_.end(), A(0));
    else
      std::copy_n(run.start + first_value_head_ * matrix(), state_.size(), state_.begin());
  }
  // The tail first: the end may be the start, and its inputs move towards the front.
  void store_state(const Run<T>& run) {
    for (std::int64_t before = 1 - s_.kernel; before < 0; ++before) {
      read_inputs(run, run.end + before, line_.data());
      for (const Channels& part : parts_)
        std::copy_n(line_.data() + part.at, part.width, run.end_state + tail(before, part));
    }
    std::copy(state_.begin(), state_.end(), run.end_state + first_value_head_ * matrix());
  }

  HeadRows<A> head(std::int64_t h, std::int64_t rows) const {
    return {rows,
            s_.key_dim,
            s_.value_dim,
            q_.data(),
            k_.data(),
            v_.data() + h * block_ * s_.value_dim,
            decay_.data() + h * block_ * decays(),
            log_decay_.data() + h * block_ * decays(),
            beta_.data() + h * block_,
            !s_.mamba};
  }

  // Computes what the recurrence reads of the rows.
  void compute_block(const Run<T>& run, std::int64_t begin, std::int64_t rows) {
    const std::int64_t dk = s_.key_dim, dv = s_.value_dim, before = s_.kernel - 1;
    for (std::int64_t r = 0; r < rows + before; ++r) read_inputs(run, begin + r - before, line_.data() + r * width_);
    rows_.convolve(rows, width_, s_.kernel, line_.data(), weight_.data(), bias_.data(), mixed_.data());
    for (std::int64_t r = 0; r < rows; ++r) {
      const A* const mixed = mixed_.data() + r * width_;
      if (normed_) {
        inverse_[size(2 * r)] = rows_.unit(dk, mixed, query_scale(), q_.data() + r * dk);
        inverse_[size(2 * r + 1)] = rows_.unit(dk, mixed + dk, A(1), k_.data() + r * dk);
      } else {
        rows_.silu(dk, mixed, q_.data() + r * dk);
        rows_.silu(dk, mixed + dk, k_.data() + r * dk);
      }
      for (std::int64_t h = 0; h < each_; ++h) rows_.silu(dv, mixed + 2 * dk + h * dv, value(h, r));
      const T* const row = projected_ + (begin + r) * s_.projected();
      for (std::int64_t h = 0; h < each_; ++h) {
        const std::int64_t at = h * block_ + r;
        if (s_.decays_channels()) {
          for (std::int64_t i = 0; i < dk; ++i) before_softplus_[size(i)] = before_softplus(row, h * dk + i);
          channels_.decays(dk, before_softplus_.data(), -std::exp(a_log(h)), log_decay_.data() + at * dk,
                           decay_.data() + at * dk);
          beta_[size(at)] = sigmoid(static_cast<A>(row[columns_.b + h]));
          continue;
        }
        const A step = s_.mamba ? within_limits(softplus(before_softplus(row, h))) : softplus(before_softplus(row, h));
        log_decay_[size(at)] = -std::exp(a_log(h)) * step;
        decay_[size(at)] = std::exp(log_decay_[size(at)]);
        beta_[size(at)] = s_.mamba ? step : sigmoid(static_cast<A>(row[columns_.b + h]));
      }
    }
  }
  A within_limits(A step) const {
    return std::clamp(step, static_cast<A>(s_.least_step), static_cast<A>(s_.largest_step));
  }
  A skip(std::int64_t h) const { return skip_ == nullptr ? A(0) : static_cast<A>(skip_[first_value_head_ + h]); }
  A* value(std::int64_t h, std::int64_t r) { return v_.data() + (h * block_ + r) * s_.value_dim; }
  // The projected numbers of a row's value head where decays are of channels, from what came to log gamma [dk] and
  // beta. Adds what came to dt [dk] and to A to these sums.
  void write_channel_gradients(std::int64_t h, std::int64_t r, const A* grad_log_decay, A grad_beta, const T* row,
                               T* grad, double* dt_sums, double& a_log_sum) const {
    const std::int64_t dk = s_.key_dim, at = h * block_ + r;
    const A rate = -std::exp(a_log(h)), beta = beta_[size(at)];
    for (std::int64_t i = 0; i < dk; ++i) {
      const A grad_a = rate * grad_log_decay[i] * sigmoid(before_softplus(row, h * dk + i));
      grad[columns_.a + h * dk + i] = static_cast<T>(grad_a);
      dt_sums[i] += static_cast<double>(grad_a);
      a_log_sum += static_cast<double>(grad_log_decay[i]) * static_cast<double>(log_decay_[size(at * dk + i)]);
    }
    grad[columns_.b + h] = static_cast<T>(grad_beta * beta * (1 - beta));
  }
  // The same where they are of heads. Returns what came to dt.
  A write_gradients(std::int64_t h, std::int64_t r, A grad_log_decay, A grad_beta, const T* row, T* grad) const {
    const auto at = size(h * block_ + r);
    const A before = before_softplus(row, h), slope = sigmoid(before), rate = -std::exp(a_log(h));
    if (s_.mamba) {
      const bool inside = within_limits(softplus(before)) == softplus(before);
      const A grad_a = inside ? (rate * grad_log_decay + grad_beta) * slope : A(0);
      grad[columns_.a + h] = static_cast<T>(grad_a);
      return grad_a;
    }
    const A beta = beta_[at], grad_a = rate * grad_log_decay * slope;
    grad[columns_.b + h] = static_cast<T>(grad_beta * beta * (1 - beta));
    grad[columns_.a + h] = static_cast<T>(grad_a);
    return grad_a;
  }
  A query_scale() const { return std::sqrt(A(1) / static_cast<A>(s_.key_dim)); }
  A a_log(std::int64_t h) const { return static_cast<A>(a_log_[first_value_head_ + h]); }
  // `decay`: one of these value heads', of a head or of a channel.
  A before_softplus(const T* row, std::int64_t decay) const {
    return static_cast<A>(row[columns_.a + decay]) + static_cast<A>(dt_bias_[first_value_head_ * decays() + decay]);
  }

  const RecurrenceShape& s_;
  std::int64_t each_, first_value_head_;
  std::int64_t block_;  // rows of the largest block
  RecurrenceShape::Columns columns_;
  std::int64_t width_;  // channels here: q, k, v
  std::array<Channels, 3> parts_;
  const T *projected_, *a_log_, *dt_bias_, *skip_;
  DeltaRuleRanges<A> rule_;
  ChannelDecayRanges<A> channels_;
  ConvolutionRanges<A> rows_;
  bool normed_;                                 // q and k
  std::vector<A> line_, weight_, bias_;         // of the convolution: inputs; [K, width]
  std::vector<A> mixed_, inverse_, q_, k_, v_;  // of a block: the convolution's result; 1 / norms
  std::vector<A> decay_, beta_, log_decay_;     // [heads, rows of a block], decays of channels [.., .., dk]
  std::vector<A> before_softplus_;              // of a row
  std::vector<A> state_, room_, out_;
  // Kept from run to run, because many runs are short.
  struct Backward {
    std::vector<A> room, keys, queries, of_o, grad_q, grad_k, grad_v, grad_log_decay;
    // Gradients of the convolution's results, for the block and the K - 1 rows behind it; of its inputs.
    std::vector<A> grad_mixed, grad_input;
  };
  Backward backward_;
};

template <class T>
void KeyHead<T>::add_backward(const Run<T>& run, const T* grad_o, const DeltaRuleGradients& gradients) {
  const std::int64_t dk = s_.key_dim, dv = s_.value_dim, K = s_.kernel, rows_of_run = run.end - run.begin;
  const std::int64_t blocks = (rows_of_run + kBlockRows - 1) / kBlockRows;
  const auto rows_of = [&](std::int64_t b) { return std::min(kBlockRows, rows_of_run - b * kBlockRows); };
  std::vector<A> starts;  // of the blocks, [blocks, heads, dk, dv]
  starts.reserve(size(blocks * each_ * matrix()));
  load_state(run);
  for (std::int64_t b = 0; b < blocks; ++b) {
    starts.insert(starts.end(), state_.begin(), state_.end());
    if (b + 1 == blocks) break;
    compute_block(run, run.begin + b * kBlockRows, rows_of(b));
    for (std::int64_t h = 0; h < each_; ++h) forward_rows(head(h, rows_of(b)), state(h), nullptr);
  }
  std::vector<A> grad(state_.size(), A(0));
  if (run.grad_end != nullptr) std::copy_n(run.grad_end + first_value_head_ * matrix(), grad.size(), grad.begin());

  const bool channels = s_.decays_channels();
  auto& [room, keys, queries, of_o, grad_q, grad_k, grad_v, grad_log_decay, grad_mixed, grad_input] = backward_;
  room.resize(size(channels ? channel_backward_room(dk, dv) : backward_room(dk, dv)));
  keys.resize(size(block_ * kBlockRows)), queries.resize(keys.size());
  of_o.resize(size(block_ * dv)), grad_v.resize(of_o.size());
  grad_q.resize(size(block_ * dk)), grad_k.resize(grad_q.size());
  std::array<A, kBlockRows> grad_beta;
  grad_log_decay.resize(size(block_ * decays()));
  grad_mixed.assign(size((block_ + K - 1) * width_), A(0)), grad_input.resize(mixed_.size());
  std::vector<double> conv_sums(size(width_ * K), 0), bias_sums(size(width_), 0), a_log_sums(size(each_), 0),
      dt_sums(size(each_ * decays()), 0), skip_sums(a_log_sums);
  T* const grad_projected = pointer<T>(gradients.projected_TW);
  for (std::int64_t b = blocks; b-- > 0;) {
    const std::int64_t rows = rows_of(b), first = run.begin + b * kBlockRows;
    compute_block(run, first, rows);
    std::copy_n(grad_mixed.begin(), (K - 1) * width_, grad_mixed.begin() + rows * width_);
    std::fill_n(grad_mixed.begin(), rows * width_, A(0));
    if (!channels) rule_.products(head(0, rows), keys.data(), queries.data(), room.data());
    for (std::int64_t h = 0; h < each_; ++h) {
      const std::int64_t value_head = first_value_head_ + h;
      for (std::int64_t r = 0; r < rows; ++r) {
        const T* const from = grad_o + ((first + r) * s_.value_heads + value_head) * dv;
        std::transform(from, from + dv, of_o.data() + r * dv, [](T x) { return static_cast<A>(x); });
      }
      const HeadGradients<A> of_rows{grad_q.data(), grad_k.data(), grad_v.data(), grad_log_decay.data(),
                                     grad_beta.data()};
      const A* const start = starts.data() + (b * each_ + h) * matrix();
      A* const of_state = grad.data() + h * matrix();
      if (channels)
        channels_.backward(head(h, rows), start, of_o.data(), of_state, of_rows, room.data());
      else
        rule_.backward(head(h, rows), keys.data(), queries.data(), start, of_o.data(), of_state, of_rows, room.data());
      for (std::int64_t r = 0; r < rows; ++r) {
        A* const mixed = grad_mixed.data() + r * width_;
        for (std::int64_t i = 0; i < dk; ++i)
          mixed[i] += grad_q[size(r * dk + i)], mixed[dk + i] += grad_k[size(r * dk + i)];
        const std::int64_t of_v = 2 * dk + h * dv;
        std::copy_n(grad_v.begin() + r * dv, dv, mixed + of_v);
        for (std::int64_t j = 0; j < dv && skip_ != nullptr; ++j) {
          const A of_result = of_o[size(r * dv + j)];
          mixed[of_v + j] += skip(h) * of_result;
          skip_sums[size(h)] += static_cast<double>(of_result) * static_cast<double>(value(h, r)[j]);
        }
        rows_.silu_backward(dv, mixed_.data() + r * width_ + of_v, mixed + of_v);
        const std::int64_t at = (first + r) * s_.projected();
        if (channels) {
          write_channel_gradients(h, r, grad_log_decay.data() + r * dk, grad_beta[size(r)], projected_ + at,
                                  grad_projected + at, dt_sums.data() + h * dk, a_log_sums[size(h)]);
          continue;
        }
        const A of_decay = grad_log_decay[size(r)];
        dt_sums[size(h)] += static_cast<double>(
            write_gradients(h, r, of_decay, grad_beta[size(r)], projected_ + at, grad_projected + at));
        a_log_sums[size(h)] += static_cast<double>(of_decay) * static_cast<double>(log_decay_[size(h * block_ + r)]);
      }
    }
    for (std::int64_t r = 0; r < rows; ++r) {
      A* const mixed = grad_mixed.data() + r * width_;
      const A* const x = mixed_.data() + r * width_;
      if (normed_) {
        rows_.unit_backward(dk, x, q_.data() + r * dk, query_scale(), inverse_[size(2 * r)], mixed);
        rows_.unit_backward(dk, x + dk, k_.data() + r * dk, A(1), inverse_[size(2 * r + 1)], mixed + dk);
      } else {
        rows_.silu_backward(2 * dk, x, mixed);
      }
      for (std::int64_t c = 0; c < width_; ++c) bias_sums[size(c)] += static_cast<double>(mixed[c]);
    }
    rows_.add_weight_gradient(rows, width_, K, line_.data(), grad_mixed.data(), conv_sums.data());
    rows_.convolve_back(rows, width_, K, grad_mixed.data(), weight_.data(), grad_input.data());
    for (std::int64_t r = 0; r < rows; ++r)
      for (const Channels& part : parts_) {
        A* const from = grad_input.data() + r * width_ + part.at;
        if (run.grad_end != nullptr && first + r > run.end - K)
          for (std::int64_t c = 0; c < part.width; ++c) from[c] += run.grad_end[tail(first + r - run.end, part) + c];
        std::transform(from, from + part.width, grad_projected + (first + r) * s_.projected() + part.column,
                       [](A x) { return static_cast<T>(x); });
      }
  }
  if (run.grad_start != nullptr) {
    for (std::int64_t i = 0; i < each_ * matrix(); ++i)
      run.grad_start[first_value_head_ * matrix() + i] += grad[size(i)];
    // The inputs before the run: by its rows, and by what follows where the run is shorter than the convolution.
    for (std::int64_t before = 1 - K; before < 0; ++before)
      for (const Channels& part : parts_)
        for (std::int64_t c = 0; c < part.width; ++c) {
          A sum = run.grad_end != nullptr && run.begin + before > run.end - K
                      ? run.grad_end[tail(run.begin + before - run.end, part) + c]
                      : A(0);
          for (std::int64_t j = -before; j < K && before + j < rows_of_run; ++j)
            sum += weight_[size((K - 1 - j) * width_ + part.at + c)] *
                   grad_mixed[size((before + j) * width_ + part.at + c)];
          run.grad_start[tail(before, part) + c] += sum;
        }
  }
  const auto add = [](const at::Tensor& to, std::int64_t index, double value) {
    if (to.defined()) pointer<A>(to)[index] += static_cast<A>(value);
  };
  for (std::int64_t h = 0; h < each_; ++h) {
    add(gradients.a_log_H, first_value_head_ + h, a_log_sums[size(h)]);
    for (std::int64_t i = h * decays(); i < (h + 1) * decays(); ++i)
      add(gradients.dt_bias_H, first_value_head_ * decays() + i, dt_sums[size(i)]);
    add(gradients.skip_H, first_value_head_ + h, skip_sums[size(h)]);
  }
  for (const Channels& part : parts_)
    for (std::int64_t c = 0; c < part.width; ++c) {
      add(gradients.conv_bias_C, part.channel + c, bias_sums[size(part.at + c)]);
      for (std::int64_t j = 0; j < K; ++j)
        add(gradients.conv_CK, (part.channel + c) * K + j, conv_sums[size(j * width_ + part.at + c)]);
    }
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

template <class T>
GatedHeadRanges<T> gated_heads() {
  return ESPALIER_FOR_SET(gated_head_ranges<T>)();
}

// The numbers under one norm: a value head, or in Mamba-2 the value heads of a key head, with weights of their own.
struct NormedParts {
  std::int64_t parts, width, of_weight;

  explicit NormedParts(const RecurrenceShape& s)
      : parts(s.mamba ? s.key_heads : s.value_heads), width(s.value_width() / parts), of_weight(s.mamba ? width : 0) {}
};

// Calls body(part, its first element of y, its first column of z in all projected rows) for every row; a thread has
// whole parts.
template <class Body>
void for_each_part(const RecurrenceShape& s, std::int64_t rows, Body body) {
  const NormedParts of(s);
  const std::int64_t each = of.parts / s.key_heads;
#pragma omp parallel for schedule(static)
  for (std::int64_t part = 0; part < of.parts; ++part)
    for (std::int64_t row = 0; row < rows; ++row)
      body(part, row * s.value_width() + part * of.width,
           row * s.projected() + s.columns(part / each).z + part % each * of.width);
}

void gated_norm(const GatedNormProblem& p, const at::Tensor& y) {
  dispatch(y.scalar_type(), [&]<class T>() {
    const GatedHeadRanges<T> ranges = gated_heads<T>();
    const auto norm = p.shape.mamba               ? ranges.gate_then_norm
                      : p.shape.decays_channels() ? ranges.norm_sigmoid
                                                  : ranges.norm;
    const NormedParts of(p.shape);
    const T *const o = pointer<T>(p.o_TV), *const z = pointer<T>(p.projected_TW), *const weight = pointer<T>(p.weight);
    T* const out = pointer<T>(y);
    for_each_part(p.shape, y.size(0), [&](std::int64_t part, std::int64_t at, std::int64_t of_z) {
      norm(of.width, static_cast<accumulator_t<T>>(p.eps), o + at, z + of_z, weight + part * of.of_weight, out + at);
    });
  });
}

void add_gated_norm_backward(const GatedNormProblem& p, const at::Tensor& grad_y, const at::Tensor& grad_o,
                             const at::Tensor& grad_projected, const at::Tensor& grad_weight) {
  dispatch(grad_y.scalar_type(), [&]<class T>() {
    using A = accumulator_t<T>;
    const RecurrenceShape& s = p.shape;
    const GatedHeadRanges<T> ranges = gated_heads<T>();
    const auto backward = s.mamba               ? ranges.gate_then_norm_backward
                          : s.decays_channels() ? ranges.norm_sigmoid_backward
                                                : ranges.norm_backward;
    const NormedParts of(s);
    const T *const o = pointer<T>(p.o_TV), *const z = pointer<T>(p.projected_TW), *const weight = pointer<T>(p.weight);
    const T* const grad = pointer<T>(grad_y);
    T *const to = pointer<T>(grad_o), *const to_z = pointer<T>(grad_projected);
    std::vector<double> sums(static_cast<std::size_t>(s.value_width()), 0);  // of each part
    for_each_part(s, grad_y.size(0), [&](std::int64_t part, std::int64_t at, std::int64_t of_z) {
      backward(of.width, static_cast<A>(p.eps), o + at, z + of_z, weight + part * of.of_weight, grad + at, to + at,
               to_z + of_z, sums.data() + part * of.width);
    });
    if (!grad_weight.defined()) return;
    for (std::int64_t c = 0; c < s.value_width(); ++c)
      pointer<A>(grad_weight)[s.mamba ? c : c % of.width] += static_cast<A>(sums[static_cast<std::size_t>(c)]);
  });
}

// Calls body(first element of y, its gate's element) for every head of every row.
template <class Body>
void for_each_gate(std::int64_t rows, std::int64_t width, std::int64_t head_dim, Body body) {
#pragma omp parallel for schedule(static)
  for (std::int64_t row = 0; row < rows; ++row)
    for (std::int64_t c = 0; c < width; c += head_dim) body(row * width + c, row * 2 * width + 2 * c + head_dim);
}

void gate_heads(const at::Tensor& x, const at::Tensor& query_gate, std::int64_t head_dim, const at::Tensor& y) {
  dispatch(y.scalar_type(), [&]<class T>() {
    const auto gate = gated_heads<T>().gate;
    const T *const in = pointer<T>(x), *const gates = pointer<T>(query_gate);
    T* const out = pointer<T>(y);
    for_each_gate(y.size(0), y.size(1), head_dim,
                  [&](std::int64_t at, std::int64_t of_gate) { gate(head_dim, in + at, gates + of_gate, out + at); });
  });
}

void gate_heads_backward(const at::Tensor& x, const at::Tensor& query_gate, std::int64_t head_dim,
                         const at::Tensor& grad_y, const at::Tensor& grad_x, const at::Tensor& grad_query_gate) {
  dispatch(x.scalar_type(), [&]<class T>() {
    const auto backward = gated_heads<T>().gate_backward;
    const T *const in = pointer<T>(x), *const gates = pointer<T>(query_gate), *const grad = pointer<T>(grad_y);
    T *const to = pointer<T>(grad_x), *const to_gate = pointer<T>(grad_query_gate);
    for_each_gate(x.size(0), x.size(1), head_dim, [&](std::int64_t at, std::int64_t of_gate) {
      backward(head_dim, in + at, gates + of_gate, grad + at, to + at, to_gate + of_gate);
    });
  });
}

}  // namespace

DeltaRuleOperations delta_rule_operations() {
  return {delta_rule, add_delta_rule_backward, gated_norm, add_gated_norm_backward, gate_heads, gate_heads_backward};
}

}  // namespace espalier::cpu
