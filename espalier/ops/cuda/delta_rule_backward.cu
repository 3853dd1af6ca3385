// The gated delta rule backward, in blocks of rows: a block of threads has a key head of a run with its value heads,
// one after the other. Where decays are of heads, a block of rows is matrix products (ops/cpu/delta_rule_ranges.h has
// the equations and the names). Where they are of channels, the products would need a decay for each pair of rows and
// each channel, so that the recurrence goes row by row (ops/cpu/channel_decay_ranges.h). The kernel keeps what it needs
// in scratch memory of its own. No sums of other blocks meet: each run's part of the parameters' gradients, and of that
// of the state it began with, is added behind it in the order of the runs.
#include <algorithm>

#include "espalier/ops/cuda/columns.h"
#include "espalier/ops/cuda/delta_rows.h"
#include "espalier/ops/cuda/delta_rule.h"
#include "espalier/ops/cuda/launch.h"

namespace espalier::cuda {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kRows = 64;       // of a block, at most
constexpr std::int64_t kGroupRows = 16;  // with decays of channels: rows whose states are held at once

// A run's part of the gradients of parameters, one behind the other; of a_log, by decays of a head: [decays, H].
struct SumPlaces {
  std::int64_t conv, bias, a_log, dt_bias, skip, all;
};
SumPlaces places_of_sums(const DeltaShape& s) {
  const std::int64_t bias = s.channels * s.kernel, heads = bias + s.channels, H = s.value_heads, decays = H * s.decays;
  return {0, bias, heads, heads + decays, heads + 2 * decays, heads + 2 * decays + H};
}

// Scratch of a block: matrices by rows. With decays of channels it has the arrays of the last lines, and none for
// pairs of rows.
template <class A>
struct Room {
  A *states, *grad;                                // [blocks of rows, heads, dk, dv]; [heads, dk, dv]
  A *line, *mixed, *grad_mixed;                    // [rows + K - 1, width], [rows, width], [rows + K - 1, width]
  A *q, *k, *v, *inverse;                          // [rows, dk], [rows, dk], [heads, rows, dv], [rows, 2]
  A *log_decay, *beta;                             // [heads, rows]; of channels: gamma [heads, rows, dk]
  A *keys, *queries;                               // [rows, rows]
  A *decays, *system, *seen;                       // D, N, P; then X, Y in the place of P, N
  A *of_o, *errors, *updates, *products, *grad_v;  // [rows, dv]
  A *grad_q, *grad_k, *written;                    // [rows, dk]
  A *from_start, *to_end, *grad_beta, *grad_skip;  // [rows]
  A *of_log_decay, *grad_a;                        // [rows, decays]
  double* of_decay;                                // [rows]
  A *group_starts, *row_states;                    // [groups of rows, dk, dv], [rows of a group, dk, dv]
};

// For each run, the blocks of rows whose states stand in scratch before its own.
struct BlocksBefore {
  std::int64_t of_run[kRunsAtOnce];
};

// Gives the arrays but `states` their places behind each other, from `memory` on; returns how many numbers they take.
template <class A>
__host__ __device__ std::int64_t set_places(const DeltaShape& s, A* memory, Room<A>& room) {
  const std::int64_t dk = s.key_dim, dv = s.value_dim, each = s.value_heads / s.key_heads, K = s.kernel;
  const std::int64_t width = 2 * dk + each * dv, rows = kRows, decays = s.decays;
  const std::int64_t squares = decays > 1 ? 0 : rows * rows, groups = decays > 1 ? kRows / kGroupRows : 0;
  std::int64_t at = 0;
  const auto take = [&](A*& array, std::int64_t count) {
    array = memory + at;
    at += (count + 1) / 2 * 2;  // doubles stand among them
  };
  A* doubles = nullptr;
  take(doubles, 2 * rows);
  room.of_decay = reinterpret_cast<double*>(doubles);
  take(room.grad, each * dk * dv);
  take(room.line, (rows + K - 1) * width), take(room.mixed, rows * width),
      take(room.grad_mixed, (rows + K - 1) * width);
  take(room.q, rows * dk), take(room.k, rows * dk), take(room.v, each * rows * dv), take(room.inverse, 2 * rows);
  take(room.log_decay, each * rows * decays), take(room.beta, each * rows);
  take(room.keys, squares), take(room.queries, squares);
  take(room.decays, squares), take(room.system, squares), take(room.seen, squares);
  take(room.of_o, rows * dv), take(room.errors, rows * dv), take(room.updates, rows * dv);
  take(room.products, rows * dv), take(room.grad_v, rows * dv);
  take(room.grad_q, rows * dk), take(room.grad_k, rows * dk), take(room.written, rows * dk);
  take(room.from_start, rows), take(room.to_end, rows), take(room.grad_beta, rows), take(room.grad_skip, rows);
  take(room.of_log_decay, rows * decays), take(room.grad_a, rows * decays);
  take(room.group_starts, groups * dk * dv), take(room.row_states, groups > 0 ? kGroupRows * dk * dv : 0);
  return at;
}

// A factor of a product: element (i, j) at at[i row + j column].
template <class A>
struct Factor {
  const A* at;
  std::int64_t row, column;
};

// to_ij = own to_ij + factor sum_t a_it b_tj, to [n, m] by rows; own 0: to is overwritten. All threads call; they meet
// before it and behind it.
template <class A>
__device__ void multiply(std::int64_t n, std::int64_t m, std::int64_t inner, Factor<A> a, Factor<A> b, A own, A factor,
                         A* to) {
  __syncthreads();
  for (std::int64_t at = threadIdx.x; at < n * m; at += kThreads) {
    const std::int64_t i = at / m, j = at % m;
    A sum = 0;
    for (std::int64_t t = 0; t < inner; ++t) sum += a.at[i * a.row + t * a.column] * b.at[t * b.row + j * b.column];
    to[at] = own != A(0) ? own * to[at] + factor * sum : factor * sum;
  }
  __syncthreads();
}
template <class A>
__device__ __forceinline__ Factor<A> rows_of(const A* at, std::int64_t columns) {
  return {at, columns, 1};
}
template <class A>
__device__ __forceinline__ Factor<A> turned(const A* at, std::int64_t columns) {
  return {at, 1, columns};
}

// Computes what the recurrence reads of rows [first, first + rows).
template <bool kChannels, class T>
__device__ void compute_block(const DeltaShape& s, const DeltaWeights<T>& w, const DeltaRun<accumulator_t<T>>& run,
                              std::int64_t key_head, std::int64_t first, std::int64_t rows,
                              const Room<accumulator_t<T>>& room) {
  using A = accumulator_t<T>;
  const std::int64_t dk = s.key_dim, dv = s.value_dim, width = width_of(s), before = s.kernel - 1;
  const std::int64_t each = s.value_heads / s.key_heads;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  __syncthreads();  // the rows before are read
  for (std::int64_t at = threadIdx.x; at < (rows + before) * width; at += kThreads) {
    const Channel c = channel_at(s, key_head, at % width);
    room.line[at] = input_at(s, w, run, first + at / width - before, c.column, c.channel);
  }
  __syncthreads();
  for (std::int64_t at = threadIdx.x; at < rows * width; at += kThreads) {
    const std::int64_t row = at / width, c = at % width, channel = channel_at(s, key_head, c).channel;
    A sum = w.conv_bias_C != nullptr ? widened(w.conv_bias_C[channel]) : A(0);
    for (std::int64_t j = 0; j < s.kernel; ++j)
      sum += widened(w.conv_CK[channel * s.kernel + j]) * room.line[(row + j) * width + c];
    room.mixed[at] = sum;
    const A x = silu(sum);
    if (c < dk)
      room.q[row * dk + c] = x;
    else if (c < 2 * dk)
      room.k[row * dk + c - dk] = x;
    else
      room.v[((c - 2 * dk) / dv * kRows + row) * dv + (c - 2 * dk) % dv] = x;
  }
  for (std::int64_t at = threadIdx.x; at < rows * each; at += kThreads) {
    const std::int64_t row = at / each, h = at % each;
    const HeadRow head{first + row, key_head * each + h, h, at_head(s.column, s.column_step, key_head)};
    room.beta[h * kRows + row] = beta_of(s, w, head);
    if (!kChannels) room.log_decay[h * kRows + row] = decay_of<false>(s, w, head, 0).log_decay;
  }
  for (std::int64_t at = threadIdx.x; kChannels && at < rows * each * dk; at += kThreads) {
    const std::int64_t row = at / dk % rows, h = at / dk / rows, c = at % dk;
    const HeadRow head{first + row, key_head * each + h, h, at_head(s.column, s.column_step, key_head)};
    room.log_decay[(h * kRows + row) * dk + c] = std::exp(decay_of<true>(s, w, head, c).log_decay);
  }
  __syncthreads();
  for (std::int64_t row = warp; row < rows && !s.mamba; row += kThreads / 32) {
    const A of_q = make_unit(dk, lane, query_scale<A>(dk), room.q + row * dk),
            of_k = make_unit(dk, lane, A(1), room.k + row * dk);
    if (lane == 0) room.inverse[2 * row] = of_q, room.inverse[2 * row + 1] = of_k;
  }
  if (kChannels) {
    __syncthreads();
    return;
  }
  multiply(rows, rows, dk, rows_of(room.k, dk), turned(room.k, dk), A(0), A(1), room.keys);
  multiply(rows, rows, dk, rows_of(room.q, dk), turned(room.k, dk), A(0), A(1), room.queries);
}

// D, N and P of a value head's block, and E and U behind a state.
template <class A>
__device__ void compute_head(bool reads, std::int64_t rows, std::int64_t dk, std::int64_t dv, const A* log_decay,
                             const A* beta, const A* v, const A* start, const Room<A>& room) {
  __syncthreads();  // the head before is read
  for (std::int64_t j = threadIdx.x; j < rows; j += kThreads) {
    double before = 0, since = 0;
    for (std::int64_t i = 0; i <= j; ++i) before += static_cast<double>(log_decay[i]);
    for (std::int64_t i = 0; i < rows; ++i) {
      if (i > j) since += static_cast<double>(log_decay[i]);
      const A decay = i < j ? A(0) : std::exp(static_cast<A>(since));
      room.decays[i * rows + j] = decay;
      room.seen[i * rows + j] = decay * room.queries[i * rows + j];
      room.system[i * rows + j] = reads && i > j ? decay * room.keys[i * rows + j] : A(0);
    }
    room.from_start[j] = std::exp(static_cast<A>(before));
    room.to_end[j] = std::exp(static_cast<A>(since));
  }
  if (reads) multiply(rows, dv, dk, rows_of(room.k, dk), rows_of(start, dv), A(0), A(1), room.errors);
  __syncthreads();  // a thread without a product reads what others summed
  for (std::int64_t j = threadIdx.x; j < dv; j += kThreads)
    for (std::int64_t i = 0; i < rows; ++i) {
      A error = reads ? v[i * dv + j] - room.errors[i * dv + j] * room.from_start[i] : v[i * dv + j];
      for (std::int64_t t = 0; reads && t < i; ++t) error -= room.system[i * rows + t] * room.updates[t * dv + j];
      room.errors[i * dv + j] = error;
      room.updates[i * dv + j] = beta[i] * error;
    }
  __syncthreads();
}

// room.products holds dA, or du, of all rows.
template <class A>
__device__ void set_grad_beta(std::int64_t rows, std::int64_t dv, const Room<A>& room) {
  for (std::int64_t i = threadIdx.x; i < rows; i += kThreads) {
    A sum = 0;
    for (std::int64_t j = 0; j < dv; ++j) sum += room.products[i * dv + j] * room.errors[i * dv + j];
    room.grad_beta[i] = sum;
  }
}

// room.grad from what came behind the block to what comes before it; the gradients of the block's rows. `start`: the
// state before it.
template <class A>
__device__ void head_backward(bool reads, std::int64_t rows, std::int64_t dk, std::int64_t dv, const A* beta,
                              const A* start, A* grad, const Room<A>& room, double (&wide)[32]) {
  const A last = room.from_start[rows - 1];
  double dot = 0;
  for (std::int64_t at = threadIdx.x; at < dk * dv; at += kThreads)
    dot += static_cast<double>(start[at]) * static_cast<double>(grad[at]);
  double of_end = static_cast<double>(last) * block_sum(dot, wide);
  multiply(rows, dv, dk, rows_of(room.k, dk), rows_of(grad, dv), A(0), A(1), room.products);
  for (std::int64_t i = threadIdx.x; i < rows; i += kThreads) {
    A written = 0;
    for (std::int64_t j = 0; j < dv; ++j) {
      const A product = room.to_end[i] * room.products[i * dv + j];
      room.products[i * dv + j] = product;
      written += room.updates[i * dv + j] * product;
    }
    room.of_decay[i] = -static_cast<double>(written);
  }
  __syncthreads();
  for (std::int64_t i = 0; i < rows; ++i) of_end -= room.of_decay[i];
  multiply(rows, dv, rows, turned(room.seen, rows), rows_of(room.of_o, dv), A(1), A(1), room.products);
  for (std::int64_t j = threadIdx.x; j < dv; j += kThreads)
    for (std::int64_t i = rows - 1; i >= 0; --i) {
      A sum = room.products[i * dv + j];
      for (std::int64_t t = i + 1; reads && t < rows; ++t) sum -= room.system[t * rows + i] * room.grad_v[t * dv + j];
      room.products[i * dv + j] = sum;
      room.grad_v[i * dv + j] = beta[i] * sum;
    }
  __syncthreads();
  set_grad_beta(rows, dv, room);
  // X and Y in the place of P and N.
  multiply(rows, rows, dv, rows_of(room.of_o, dv), turned(room.updates, dv), A(0), A(1), room.seen);
  multiply(rows, rows, dv, rows_of(room.grad_v, dv), turned(room.updates, dv), A(0), A(-1), room.system);
  for (std::int64_t at = threadIdx.x; at < rows * rows; at += kThreads) {
    room.seen[at] *= room.decays[at];
    room.system[at] *= reads && at / rows > at % rows ? room.decays[at] : A(0);
  }
  __syncthreads();
  for (std::int64_t i = threadIdx.x; i < rows; i += kThreads) {
    const auto term = [&](std::int64_t later, std::int64_t earlier) {
      const std::int64_t at = later * rows + earlier;
      return static_cast<double>(room.seen[at] * room.queries[at] + room.system[at] * room.keys[at]);
    };
    double sum = 0;
    for (std::int64_t j = 0; j < i; ++j) sum += term(i, j);
    for (std::int64_t t = i + 1; t < rows; ++t) sum -= term(t, i);
    room.of_decay[i] += sum;
  }
  // The rows' updates reach k before the state behind them is taken back.
  __syncthreads();
  for (std::int64_t at = threadIdx.x; at < rows * dv; at += kThreads) {
    room.updates[at] *= room.to_end[at / dv];
    room.products[at] = room.from_start[at / dv] * room.of_o[at];
  }
  multiply(rows, dk, dv, rows_of(room.updates, dv), turned(grad, dv), A(0), A(1), room.written);
  multiply(rows, dk, rows, turned(room.seen, rows), rows_of(room.q, dk), A(1), A(1), room.written);
  multiply(rows, dk, rows, turned(room.system, rows), rows_of(room.k, dk), A(1), A(1), room.written);
  multiply(rows, dk, dv, rows_of(room.products, dv), turned(start, dv), A(0), A(1), room.grad_q);
  const auto add_to_decay = [&](const A* x, const A* of_x) {
    for (std::int64_t i = threadIdx.x; i < rows; i += kThreads) {
      A sum = 0;
      for (std::int64_t c = 0; c < dk; ++c) sum += x[i * dk + c] * of_x[i * dk + c];
      room.of_decay[i] += static_cast<double>(sum);
    }
  };
  add_to_decay(room.q, room.grad_q);
  multiply(rows, dk, rows, rows_of(room.seen, rows), rows_of(room.k, dk), A(1), A(1), room.grad_q);
  multiply(dk, dv, rows, turned(room.q, dk), rows_of(room.products, dv), last, A(1), grad);
  if (reads) {
    for (std::int64_t at = threadIdx.x; at < rows * dv; at += kThreads)
      room.products[at] = room.from_start[at / dv] * room.grad_v[at];
    multiply(rows, dk, dv, rows_of(room.products, dv), turned(start, dv), A(0), A(-1), room.grad_k);
    add_to_decay(room.k, room.grad_k);
    multiply(rows, dk, rows, rows_of(room.system, rows), rows_of(room.k, dk), A(1), A(1), room.grad_k);
    multiply(dk, dv, rows, turned(room.k, dk), rows_of(room.products, dv), A(1), A(-1), grad);
  }
  __syncthreads();
  for (std::int64_t at = threadIdx.x; at < rows * dk; at += kThreads)
    room.grad_k[at] = reads ? room.grad_k[at] + room.written[at] : room.written[at];
  if (threadIdx.x == 0)
    for (std::int64_t i = rows - 1; i >= 0; --i) {
      of_end += room.of_decay[i];
      room.of_log_decay[i] = static_cast<A>(of_end);
    }
  __syncthreads();
}

// Rows of a head where decays are of channels.
template <class A>
struct ChannelRows {
  std::int64_t dk, dv;
  const A *q, *k, *v, *decay, *beta;  // [rows, dk], [rows, dk], [rows, dv], gamma [rows, dk], [rows]
};

template <class A>
__device__ __forceinline__ ChannelRows<A> channel_rows(const DeltaShape& s, std::int64_t h, const Room<A>& room) {
  return {s.key_dim,
          s.value_dim,
          room.q,
          room.k,
          room.v + h * kRows * s.value_dim,
          room.log_decay + h * kRows * s.decays,
          room.beta + h * kRows};
}

// Column j of the states behind rows [first, end): the state of row r is at states + (r - first) * step; before the
// first row it is `start`. e and u of these rows. Columns do not meet, so that a thread goes through all rows alone.
template <class A>
__device__ void advance_column(const ChannelRows<A>& h, std::int64_t j, std::int64_t first, std::int64_t end,
                               const A* start, std::int64_t step, A* states, const Room<A>& room) {
  const A* before = start;
  for (std::int64_t row = first; row < end; ++row) {
    A* const after = states + (row - first) * step;
    const A *const k = h.k + row * h.dk, *const decay = h.decay + row * h.dk;
    A seen = 0;
    for (std::int64_t i = 0; i < h.dk; ++i) seen += before[i * h.dv + j] * (decay[i] * k[i]);
    const A error = h.v[row * h.dv + j] - seen, update = h.beta[row] * error;
    room.errors[row * h.dv + j] = error;
    room.updates[row * h.dv + j] = update;
    for (std::int64_t i = 0; i < h.dk; ++i) after[i * h.dv + j] = before[i * h.dv + j] * decay[i] + update * k[i];
    before = after;
  }
}

// `grad` from dS' of a row, whose state before it is `before` and behind it `after`, to its dS; the row's gradients.
template <class A>
__device__ void row_backward(const ChannelRows<A>& h, std::int64_t row, const A* before, const A* after, A* grad,
                             const Room<A>& room) {
  const std::int64_t dk = h.dk, dv = h.dv;
  const A *const q = h.q + row * dk, *const k = h.k + row * dk, *const decay = h.decay + row * dk,
                 *const of_o = room.of_o + row * dv, *const update = room.updates + row * dv;
  A* const of_value = room.grad_v + row * dv;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  for (std::int64_t j = threadIdx.x; j < dv; j += kThreads) {
    A of_update = 0;
    for (std::int64_t i = 0; i < dk; ++i) {
      const A all = grad[i * dv + j] + q[i] * of_o[j];
      grad[i * dv + j] = all;
      of_update += all * k[i];
    }
    room.products[row * dv + j] = of_update;
    of_value[j] = h.beta[row] * of_update;
  }
  __syncthreads();
  for (std::int64_t i = warp; i < dk; i += kThreads / 32) {
    A of_q = 0, of_k = 0, of_decay = 0;
    for (std::int64_t j = lane; j < dv; j += 32) {
      const std::int64_t at = i * dv + j;
      const A all = grad[at], rest = all - k[i] * of_value[j], state = before[at];
      of_q += after[at] * of_o[j];
      of_k += all * update[j] - decay[i] * state * of_value[j];
      of_decay += state * rest;
      grad[at] = decay[i] * rest;
    }
    of_q = warp_sum(of_q), of_k = warp_sum(of_k), of_decay = warp_sum(of_decay);
    if (lane == 0) {
      room.grad_q[row * dk + i] = of_q;
      room.grad_k[row * dk + i] = of_k;
      room.of_log_decay[row * dk + i] = decay[i] * of_decay;
    }
  }
  __syncthreads();
}

// As head_backward, with decays of channels: states before each group of rows first, then, from the last group on,
// those behind its rows.
template <class A>
__device__ void channels_backward(const ChannelRows<A>& h, std::int64_t rows, const A* start, A* grad,
                                  const Room<A>& room) {
  const std::int64_t matrix = h.dk * h.dv, groups = (rows + kGroupRows - 1) / kGroupRows;
  const auto start_of = [&](std::int64_t group) { return group == 0 ? start : room.group_starts + group * matrix; };
  for (std::int64_t j = threadIdx.x; j < h.dv; j += kThreads)
    for (std::int64_t group = 1; group < groups; ++group)
      advance_column(h, j, (group - 1) * kGroupRows, group * kGroupRows, start_of(group - 1), 0,
                     room.group_starts + group * matrix, room);
  for (std::int64_t group = groups - 1; group >= 0; --group) {
    const std::int64_t first = group * kGroupRows, end = rows < first + kGroupRows ? rows : first + kGroupRows;
    for (std::int64_t j = threadIdx.x; j < h.dv; j += kThreads)
      advance_column(h, j, first, end, start_of(group), matrix, room.row_states, room);
    for (std::int64_t row = end - 1; row >= first; --row) {
      A* const after = room.row_states + (row - first) * matrix;
      row_backward(h, row, row == first ? start_of(group) : after - matrix, after, grad, room);
    }
  }
  set_grad_beta(rows, h.dv, room);
  __syncthreads();
}

// rooms: [runs, key heads, room_size]; block_states: [runs, key heads, blocks of the run, heads, dk, dv]; part: [runs,
// sums]; state_part: [runs, N].
template <class T, bool kChannels>
__global__ void __launch_bounds__(kThreads)
    delta_backward_kernel(DeltaShape s, DeltaWeights<T> w, DeltaRuns<accumulator_t<T>> runs, SumPlaces places,
                          BlocksBefore before, std::int64_t room_size, accumulator_t<T>* rooms,
                          accumulator_t<T>* block_states, const T* grad_o_TV, T* grad_projected_TW,
                          accumulator_t<T>* part, accumulator_t<T>* state_part) {
  using A = accumulator_t<T>;

  ESPALIER_SHARED(double[32], wide);
  const DeltaRun<A> run = runs.of[blockIdx.x];
  const std::int64_t key_head = blockIdx.y, dk = s.key_dim, dv = s.value_dim, K = s.kernel,
                     each = s.value_heads / s.key_heads, decays = kChannels ? dk : 1;
  const std::int64_t width = width_of(s), matrix = dk * dv, total = run.end - run.begin, states = matrix_of(s);
  const std::int64_t blocks = (total + kRows - 1) / kRows, first_head = key_head * each;
  const DeltaPlaces place = at_head(s.column, s.column_step, key_head);
  const bool reads = !s.mamba;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  Room<A> room{};
  set_places(s, rooms + (blockIdx.x * s.key_heads + key_head) * room_size, room);
  room.states =
      block_states + (before.of_run[blockIdx.x] * s.key_heads + key_head * (blocks > 0 ? blocks : 1)) * each * matrix;
  A* const sums = part + blockIdx.x * places.all;
  for (std::int64_t c = threadIdx.x; c < width; c += kThreads) {
    const std::int64_t channel = channel_at(s, key_head, c).channel;
    for (std::int64_t j = 0; j < K; ++j) sums[places.conv + channel * K + j] = 0;
    sums[places.bias + channel] = 0;
  }
  for (std::int64_t at = threadIdx.x; at < each * decays; at += kThreads)
    sums[places.a_log + at % decays * s.value_heads + first_head + at / decays] =
        sums[places.dt_bias + first_head * decays + at] = 0;
  for (std::int64_t h = threadIdx.x; h < each; h += kThreads) sums[places.skip + first_head + h] = 0;
  // The states before each block of rows.
  for (std::int64_t at = threadIdx.x; at < each * matrix; at += kThreads) {
    room.states[at] = run.start != nullptr ? run.start[first_head * matrix + at] : A(0);
    room.grad[at] = run.grad_end != nullptr ? run.grad_end[first_head * matrix + at] : A(0);
  }
  for (std::int64_t at = threadIdx.x; at < (kRows + K - 1) * width; at += kThreads) room.grad_mixed[at] = 0;
  for (std::int64_t b = 0; b + 1 < blocks; ++b) {
    compute_block<kChannels>(s, w, run, key_head, run.begin + b * kRows, kRows, room);
    for (std::int64_t h = 0; h < each; ++h) {
      const A* const start = room.states + (b * each + h) * matrix;
      A* const next = room.states + ((b + 1) * each + h) * matrix;
      if constexpr (kChannels) {
        const ChannelRows<A> of_head = channel_rows(s, h, room);
        for (std::int64_t j = threadIdx.x; j < dv; j += kThreads)
          advance_column(of_head, j, 0, kRows, start, 0, next, room);
        continue;
      }
      compute_head(reads, kRows, dk, dv, room.log_decay + h * kRows, room.beta + h * kRows, room.v + h * kRows * dv,
                   start, room);
      for (std::int64_t at = threadIdx.x; at < matrix; at += kThreads) {
        A sum = room.from_start[kRows - 1] * start[at];
        for (std::int64_t i = 0; i < kRows; ++i)
          sum += room.to_end[i] * room.k[i * dk + at / dv] * room.updates[i * dv + at % dv];
        next[at] = sum;
      }
    }
  }
  for (std::int64_t b = blocks - 1; b >= 0; --b) {
    const std::int64_t first = run.begin + b * kRows, rows = run.end - first < kRows ? run.end - first : kRows;
    compute_block<kChannels>(s, w, run, key_head, first, rows, room);
    // The first rows of the block behind this one follow it.
    for (std::int64_t c = threadIdx.x; c < width; c += kThreads) {
      A behind[kLargestKernel];
      for (std::int64_t j = 0; j + 1 < K; ++j) behind[j] = room.grad_mixed[j * width + c];
      for (std::int64_t j = 0; j + 1 < K; ++j) room.grad_mixed[(rows + j) * width + c] = behind[j];
      for (std::int64_t i = 0; i < rows; ++i) room.grad_mixed[i * width + c] = 0;
    }
    for (std::int64_t h = 0; h < each; ++h) {
      const std::int64_t head = first_head + h;
      const A *const beta = room.beta + h * kRows, *const v = room.v + h * kRows * dv,
                     *const start = room.states + (b * each + h) * matrix;
      if constexpr (!kChannels) compute_head(reads, rows, dk, dv, room.log_decay + h * kRows, beta, v, start, room);
      for (std::int64_t at = threadIdx.x; at < rows * dv; at += kThreads)
        room.of_o[at] = widened(grad_o_TV[((first + at / dv) * s.value_heads + head) * dv + at % dv]);
      __syncthreads();
      if constexpr (kChannels)
        channels_backward(channel_rows(s, h, room), rows, start, room.grad + h * matrix, room);
      else
        head_backward(reads, rows, dk, dv, beta, start, room.grad + h * matrix, room, wide);
      const A skip = w.skip_H != nullptr ? widened(w.skip_H[head]) : A(0);
      for (std::int64_t c = threadIdx.x; c < 2 * dk + dv; c += kThreads)
        for (std::int64_t i = 0; i < rows; ++i) {
          A* const mixed = room.grad_mixed + i * width;
          if (c < dk) {
            mixed[c] += room.grad_q[i * dk + c];
          } else if (c < 2 * dk) {
            mixed[c] += room.grad_k[i * dk + c - dk];
          } else {
            const std::int64_t j = c - 2 * dk, at = 2 * dk + h * dv + j;
            mixed[at] =
                (room.grad_v[i * dv + j] + skip * room.of_o[i * dv + j]) * silu_slope(room.mixed[i * width + at]);
          }
        }
      for (std::int64_t at = threadIdx.x; at < rows * decays; at += kThreads) {
        const std::int64_t i = at / decays, c = at % decays;
        const Decay<A> decay = decay_of<kChannels>(s, w, {first + i, head, h, place}, c);
        const A slope = A(1) / (std::exp(-decay.before) + A(1)), rate = -std::exp(widened(w.a_log_H[head])),
                of_decay = room.of_log_decay[at];
        A of_a = rate * of_decay * slope;
        if (s.mamba) of_a = decay.clamped ? A(0) : (rate * of_decay + room.grad_beta[i]) * slope;
        grad_projected_TW[(first + i) * s.projected + place.a + h * decays + c] = narrowed<T>(of_a);
        room.grad_a[at] = of_a;
        room.of_log_decay[at] = of_decay * decay.log_decay;  // in its place for the sum below
      }
      for (std::int64_t i = threadIdx.x; i < rows; i += kThreads) {
        if (reads)
          grad_projected_TW[(first + i) * s.projected + place.b + h] =
              narrowed<T>(room.grad_beta[i] * beta[i] * (A(1) - beta[i]));
        A of_skip = 0;
        for (std::int64_t j = 0; j < dv && w.skip_H != nullptr; ++j) of_skip += room.of_o[i * dv + j] * v[i * dv + j];
        room.grad_skip[i] = of_skip;
      }
      __syncthreads();
      for (std::int64_t c = threadIdx.x; c < decays; c += kThreads)
        for (std::int64_t i = 0; i < rows; ++i) {
          sums[places.dt_bias + head * decays + c] += room.grad_a[i * decays + c];
          sums[places.a_log + c * s.value_heads + head] += room.of_log_decay[i * decays + c];
        }
      for (std::int64_t i = 0; i < rows && threadIdx.x == 0; ++i) sums[places.skip + head] += room.grad_skip[i];
    }
    __syncthreads();
    // Through the norms and activations of q and k.
    for (std::int64_t row = warp; row < rows && reads; row += kThreads / 32)
      for (int which = 0; which < 2; ++which) {
        const A scale = which == 0 ? query_scale<A>(dk) : A(1), inverse = room.inverse[2 * row + which];
        const A* const y = (which == 0 ? room.q : room.k) + row * dk;
        A* const to = room.grad_mixed + row * width + which * dk;
        const A* const x = room.mixed + row * width + which * dk;
        A along = 0;
        for (std::int64_t i = lane; i < dk; i += 32) along += to[i] * y[i];
        along = warp_sum(along) / scale;
        for (std::int64_t i = lane; i < dk; i += 32)
          to[i] = (to[i] * scale - y[i] * along) * inverse * silu_slope(x[i]);
      }
    for (std::int64_t at = threadIdx.x; at < rows * 2 * dk && !reads; at += kThreads) {
      const std::int64_t place_at = at / (2 * dk) * width + at % (2 * dk);
      room.grad_mixed[place_at] *= silu_slope(room.mixed[place_at]);
    }
    __syncthreads();
    // Through the convolution.
    for (std::int64_t c = threadIdx.x; c < width; c += kThreads) {
      const Channel at = channel_at(s, key_head, c);
      A of_bias = 0;
      for (std::int64_t i = 0; i < rows; ++i) of_bias += room.grad_mixed[i * width + c];
      sums[places.bias + at.channel] += of_bias;
      for (std::int64_t j = 0; j < K; ++j) {
        A of_weight = 0;
        for (std::int64_t i = 0; i < rows; ++i)
          of_weight += room.grad_mixed[i * width + c] * room.line[(i + j) * width + c];
        sums[places.conv + at.channel * K + j] += of_weight;
      }
      for (std::int64_t i = 0; i < rows; ++i) {
        A sum = 0;
        for (std::int64_t j = 0; j < K; ++j)
          sum += widened(w.conv_CK[at.channel * K + K - 1 - j]) * room.grad_mixed[(i + j) * width + c];
        if (run.grad_end != nullptr && first + i > run.end - K)
          sum += run.grad_end[tail_at(s, first + i - run.end, at.channel)];
        grad_projected_TW[(first + i) * s.projected + at.column] = narrowed<T>(sum);
      }
    }
  }
  __syncthreads();
  if (run.grad_start == nullptr) return;
  A* const to = state_part + blockIdx.x * (states + (K - 1) * s.channels);
  for (std::int64_t at = threadIdx.x; at < each * matrix; at += kThreads) to[first_head * matrix + at] = room.grad[at];
  // The inputs before the run: by its rows, and by what follows where the run is shorter than the convolution.
  for (std::int64_t c = threadIdx.x; c < width; c += kThreads) {
    const std::int64_t channel = channel_at(s, key_head, c).channel;
    for (std::int64_t before = 1 - K; before < 0; ++before) {
      A sum = run.grad_end != nullptr && run.begin + before > run.end - K
                  ? run.grad_end[tail_at(s, run.begin + before - run.end, channel)]
                  : A(0);
      for (std::int64_t j = -before; j < K && before + j < total; ++j)
        sum += widened(w.conv_CK[channel * K + K - 1 - j]) * room.grad_mixed[(before + j) * width + c];
      to[tail_at(s, before, channel)] = sum;
    }
  }
}

}  // namespace

template <class T>
void add_delta_rule_backward(const DeltaShape& shape, const DeltaWeights<T>& weights,
                             const DeltaRuns<accumulator_t<T>>& runs, const T* grad_o_TV, T* grad_projected_TW,
                             const DeltaSums<accumulator_t<T>>& sums) {
  using A = accumulator_t<T>;
  const std::int64_t H = shape.value_heads, matrix = H * shape.key_dim * shape.value_dim,
                     state = matrix + (shape.kernel - 1) * shape.channels;
  std::int64_t blocks = 0;
  BlocksBefore before{};
  for (std::int64_t r = 0; r < runs.count; ++r) {
    before.of_run[r] = blocks;
    blocks += std::max<std::int64_t>(1, ceil_div(runs.of[r].end - runs.of[r].begin, kRows));
  }
  Room<A> unused{};
  const std::int64_t room = set_places(shape, static_cast<A*>(nullptr), unused);
  const SumPlaces places = places_of_sums(shape);
  // mixers/recurrence/gpu_work.h counts them.
  const Scratch<A> rooms(runs.count * shape.key_heads * room), block_states(blocks * matrix),
      part(runs.count * places.all), states(runs.count * state);
  launch(shape.decays > 1 ? delta_backward_kernel<T, true> : delta_backward_kernel<T, false>,
         {runs.count, shape.key_heads}, kThreads, 0, shape, weights, runs, places, before, room, rooms.get(),
         block_states.get(), grad_o_TV, grad_projected_TW, part.get(), states.get());
  for (std::int64_t r = 0; r < runs.count; ++r) {
    const A* const own = part.get() + r * places.all;
    if (sums.conv_CK != nullptr) add_parts(1, shape.channels * shape.kernel, own + places.conv, sums.conv_CK);
    if (sums.conv_bias_C != nullptr) add_parts(1, shape.channels, own + places.bias, sums.conv_bias_C);
    if (sums.a_log_H != nullptr) add_parts(shape.decays, H, own + places.a_log, sums.a_log_H);
    if (sums.dt_bias_H != nullptr) add_parts(1, H * shape.decays, own + places.dt_bias, sums.dt_bias_H);
    if (sums.skip_H != nullptr) add_parts(1, H, own + places.skip, sums.skip_H);
    if (runs.of[r].grad_start != nullptr) add_parts(1, state, states.get() + r * state, runs.of[r].grad_start);
  }
}

#define ESPALIER_INSTANTIATE(T)                                                                                        \
  template void add_delta_rule_backward(const DeltaShape&, const DeltaWeights<T>&, const DeltaRuns<accumulator_t<T>>&, \
                                        const T*, T*, const DeltaSums<accumulator_t<T>>&);
ESPALIER_INSTANTIATE(float)
ESPALIER_INSTANTIATE(double)
ESPALIER_INSTANTIATE(bfloat16)
#undef ESPALIER_INSTANTIATE

}  // namespace espalier::cuda
