// Sampling: a block has a row of logits. Top-k and top-p keep everything above one logit and the first few tokens
// that have that logit; it is found by fixing the bits of that logit one after the other, from the highest, each
// with one pass over the row. Nothing is sorted and nothing is stored.
#include "espalier/ops/cuda/choice.h"

#include "espalier/ops/cuda/kernel.h"
#include "espalier/ops/cuda/launch.h"

namespace espalier::cuda {
namespace {

constexpr int kThreads = 256;

// Unsigned numbers that order as the logits do; 0 and -0 are one.
__device__ __forceinline__ std::uint64_t order_of(float x) {
#ifdef __CUDACC__
  const std::uint32_t bits = __float_as_uint(x + 0.0f);
#else
  const auto bits = std::bit_cast<std::uint32_t>(x + 0.0f);
#endif
  return (bits >> 31) != 0 ? static_cast<std::uint32_t>(~bits) : bits | 0x80000000u;
}
__device__ __forceinline__ std::uint64_t order_of(double x) {
#ifdef __CUDACC__
  const auto bits = static_cast<std::uint64_t>(__double_as_longlong(x + 0.0));
#else
  const auto bits = std::bit_cast<std::uint64_t>(x + 0.0);
#endif
  return (bits >> 63) != 0 ? ~bits : bits | (std::uint64_t{1} << 63);
}

template <class L>
struct Row {
  const L* logit;
  std::int64_t vocabulary;
  double max, inverse;
};

template <class L>
__device__ __forceinline__ double weight_of(const Row<L>& row, std::int64_t v) {
  return std::exp((static_cast<double>(row.logit[v]) - row.max) * row.inverse);
}

// Everything above `order`, and of the tokens that have it the first `ties`.
struct Cut {
  std::uint64_t order;
  std::int64_t ties;
};

// Tokens, or their weight, at or above `order`, of the whole row; in every thread.
template <class L>
__device__ double measure(const Row<L>& row, std::uint64_t order, bool weighted, double (&scratch)[32]) {
  double sum = 0;
  for (std::int64_t v = threadIdx.x; v < row.vocabulary; v += kThreads)
    if (order_of(row.logit[v]) >= order) sum += weighted ? weight_of(row, v) : 1.0;
  return block_sum(sum, scratch);
}

// The largest order at or above which there is at least so much; 0 where there never is.
template <class L>
__device__ std::uint64_t highest_reaching(const Row<L>& row, double wanted, bool weighted, double (&scratch)[32]) {
  std::uint64_t order = 0;
  for (int bit = static_cast<int>(sizeof(L)) * 8 - 1; bit >= 0; --bit) {
    const std::uint64_t higher = order | std::uint64_t{1} << bit;
    if (measure(row, higher, weighted, scratch) >= wanted) order = higher;
  }
  return order;
}

// A weight of the tokens that have exactly this order, and their number.
template <class L>
__device__ double weight_at(const Row<L>& row, std::uint64_t order, double& count, double (&scratch)[32]) {
  double sum = 0, number = 0;
  for (std::int64_t v = threadIdx.x; v < row.vocabulary; v += kThreads)
    if (order_of(row.logit[v]) == order) sum += weight_of(row, v), number += 1;
  count = block_sum(number, scratch);
  sum = block_sum(sum, scratch);
  return count > 0 ? sum / count : 0;
}

template <class L>
__device__ Cut cut_of(const Row<L>& row, std::int64_t top_k, double top_p, double (&scratch)[32]) {
  Cut cut{0, row.vocabulary};
  double count = 0;
  if (top_k >= 1 && top_k < row.vocabulary) {
    cut.order = highest_reaching(row, static_cast<double>(top_k), false, scratch);
    weight_at(row, cut.order, count, scratch);
    const double above = measure(row, cut.order, false, scratch) - count;
    cut.ties = top_k - static_cast<std::int64_t>(above);
  }
  if (!(top_p < 1)) return cut;
  const double cut_weight = weight_at(row, cut.order, count, scratch);
  const double above_cut = measure(row, cut.order + 1, true, scratch);
  const double ties = static_cast<double>(cut.ties) < count ? static_cast<double>(cut.ties) : count;
  // The likeliest token is kept whatever top_p is.
  const double share = top_p * (above_cut + ties * cut_weight), wanted = share > 0 ? share : 1e-300;
  const std::uint64_t order = highest_reaching(row, wanted, true, scratch);
  const bool higher = order > cut.order;
  const double weight = higher ? weight_at(row, order, count, scratch) : cut_weight;
  double reached = higher ? measure(row, order + 1, true, scratch) : above_cut;
  const std::int64_t most = static_cast<std::int64_t>(higher ? count : ties);
  std::int64_t kept = 0;
  while (kept < most && reached < wanted) reached += weight, ++kept;
  return {higher ? order : cut.order, kept};
}

// Calls visit(v, w) for the kept tokens of [begin, end), in order; `before` ties stand before `begin`.
template <class L, class Visit>
__device__ void for_each_kept(const Row<L>& row, const Cut& cut, std::int64_t begin, std::int64_t end,
                              std::int64_t before, Visit visit) {
  for (std::int64_t v = begin; v < end; ++v) {
    const std::uint64_t order = order_of(row.logit[v]);
    if (order > cut.order || (order == cut.order && before++ < cut.ties))
      if (!visit(v, weight_of(row, v))) return;
  }
}

template <class L>
struct ChoiceMemory {
  double scratch[32];
  double mass[kThreads];        // of each thread's tokens
  std::int64_t ties[kThreads];  // of those before the thread's
  std::int64_t likeliest[kThreads];
};

// Each thread writes some words. `each`: tokens of the part of a thread whose ties memory.ties counts.
template <class L>
__device__ void write_kept(const Row<L>& row, const Cut& cut, std::int64_t each, const ChoiceMemory<L>& memory,
                           std::int32_t* words) {
  for (std::int64_t from = 32 * static_cast<std::int64_t>(threadIdx.x); from < row.vocabulary; from += 32 * kThreads) {
    const std::int64_t part = from / each, to = from + 32 < row.vocabulary ? from + 32 : row.vocabulary;
    std::int64_t before = 0;
    for (std::int64_t other = 0; other < part; ++other) before += memory.ties[other];
    for (std::int64_t v = part * each; v < from; ++v) before += order_of(row.logit[v]) == cut.order ? 1 : 0;
    std::uint32_t bits = 0;
    for_each_kept(row, cut, from, to, before, [&](std::int64_t v, double) {
      bits |= std::uint32_t{1} << (v - from);
      return true;
    });
    words[from / 32] = static_cast<std::int32_t>(bits);
  }
}

// kept_BW null: kept tokens are not asked for.
template <class L>
__global__ void __launch_bounds__(kThreads)
    choose_tokens_kernel(std::int64_t vocabulary, const L* logits, ChoiceRule rule, double inverse,
                         const std::int32_t* begin_B1, const double* uniform_N, double* token_N, double* logprob_N,
                         std::int32_t* kept_BW) {
  ESPALIER_SHARED(ChoiceMemory<L>, memory);
  const int t = static_cast<int>(threadIdx.x);
  const std::int64_t b = blockIdx.x, each = (vocabulary + kThreads - 1) / kThreads;
  const std::int64_t begin = t * each < vocabulary ? t * each : vocabulary;
  const std::int64_t end = begin + each < vocabulary ? begin + each : vocabulary;
  Row<L> row{logits + b * vocabulary, vocabulary, -INFINITY, inverse};
  // The likeliest of each thread's tokens, then of all: the lowest number of several.
  std::int64_t best = begin < end ? begin : 0;
  for (std::int64_t v = begin; v < end; ++v)
    if (row.logit[v] > row.logit[best]) best = v;
  memory.likeliest[t] = best;
  __syncthreads();
  best = 0;
  for (int other = 0; other < kThreads; ++other)
    if (row.logit[memory.likeliest[other]] > row.logit[best]) best = memory.likeliest[other];
  row.max = static_cast<double>(row.logit[best]);
  double sum = 0;
  for (std::int64_t v = t; v < vocabulary; v += kThreads) sum += weight_of(row, v);
  const double log_sum = std::log(block_sum(sum, memory.scratch));
  const std::int32_t first = begin_B1[b] - begin_B1[0], last = begin_B1[b + 1] - begin_B1[0];
  const auto write = [&](std::int32_t n, std::int64_t token) {
    token_N[n] = static_cast<double>(token);
    logprob_N[n] = (static_cast<double>(row.logit[token]) - row.max) * inverse - log_sum;
  };
  if (rule.temperature == 0) {
    for (std::int32_t n = first + t; n < last; n += kThreads) write(n, best);
    return;
  }
  const Cut cut = cut_of(row, rule.top_k, rule.top_p, memory.scratch);
  std::int64_t ties = 0;
  for (std::int64_t v = begin; v < end; ++v) ties += order_of(row.logit[v]) == cut.order ? 1 : 0;
  memory.ties[t] = ties;
  __syncthreads();
  if (kept_BW != nullptr && first < last) write_kept(row, cut, each, memory, kept_BW + b * ((vocabulary + 31) / 32));
  ties = 0;
  for (int other = 0; other < t; ++other) ties += memory.ties[other];
  double mass = 0;
  for_each_kept(row, cut, begin, end, ties, [&](std::int64_t, double w) {
    mass += w;
    return true;
  });
  memory.mass[t] = mass;
  __syncthreads();
  double total = 0;
  for (int other = 0; other < kThreads; ++other) total += memory.mass[other];
  // A thread has a draw: it walks the threads' masses, then the tokens of the thread where the number is used up; the
  // last one with weight where rounding leaves a rest.
  for (std::int32_t n = first + t; n < last; n += kThreads) {
    double left = uniform_N[n] * total;
    int part = 0;
    for (int other = 0; other < kThreads; ++other) {
      if (!(memory.mass[other] > 0)) continue;
      part = other;
      if (left < memory.mass[other]) break;
      left -= memory.mass[other];
    }
    const std::int64_t from = part * each, to = from + each < vocabulary ? from + each : vocabulary;
    std::int64_t before = 0, token = best;
    for (int other = 0; other < part; ++other) before += memory.ties[other];
    for_each_kept(row, cut, from, to, before, [&](std::int64_t v, double w) {
      if (!(w > 0)) return true;
      token = v;
      if (left < w) return false;
      left -= w;
      return true;
    });
    write(n, token);
  }
}

}  // namespace

template <class L>
void choose_tokens(std::int64_t rows, std::int64_t vocabulary, const L* logits, const ChoiceRule& rule,
                   const std::int32_t* begin_B1, const double* uniform_N, double* token_N, double* logprob_N,
                   std::int32_t* kept_BW) {
  launch(choose_tokens_kernel<L>, {rows}, kThreads, 0, vocabulary, logits, rule, rule.inverse_temperature(), begin_B1,
         uniform_N, token_N, logprob_N, kept_BW);
}

template void choose_tokens(std::int64_t, std::int64_t, const float*, const ChoiceRule&, const std::int32_t*,
                            const double*, double*, double*, std::int32_t*);
template void choose_tokens(std::int64_t, std::int64_t, const double*, const ChoiceRule&, const std::int32_t*,
                            const double*, double*, double*, std::int32_t*);

}  // namespace espalier::cuda
