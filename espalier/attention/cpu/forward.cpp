// Forward of shared-prefix attention on a CPU; compiled once per instruction set.
//
//   per panel and key block: S = K Q^T, m' = max(m, scale S), P = e^(scale S - m'), a = e^(m - m'),
//   l = l a + sum P, O^T = O^T a + V^T P;  at the end out = O / l, lse = m + log l   (mathematics, section 5)
//
// A task is a stretch of lanes of one key/value head. It walks the key blocks once, path first, copies each block next
// to the core and meets it with all its panels, so path and own rows share one online softmax and one rounding.
#include <omp.h>

#include "espalier/attention/cpu/kernels.h"
#include "espalier/attention/cpu/panel.h"

namespace espalier::ESPALIER_SIMD {
namespace {

// Lanes of one task: queries and sums of a task stay near the core beside a key block; small problems are cut
// into at least four tasks a thread.
template <class A>
std::int64_t task_panels(const Shape& shape, int threads) {
  const std::int64_t lanes = shape.query_rows * (shape.heads / shape.kv_heads);
  const std::int64_t near = 262144 / static_cast<std::int64_t>(sizeof(A)) / shape.head_dim / kPanel<A>;
  const std::int64_t fair = ceil_div(lanes * shape.kv_heads, 4 * threads * kPanel<A>);
  return greater(1, lesser(greater(near, 2), fair));
}

template <class A>
struct Scratch {
  A *queries, *sums, *top, *total, *keys, *values, *scores;
  IntegerVector<A>* rows;

  Scratch(Carver& carver, const Shape& shape, std::int64_t panels) {
    const std::int64_t block = key_block<A>(shape.head_dim);
    queries = carver.take<A>(panels * shape.head_dim * kPanel<A>);
    sums = carver.take<A>(panels * shape.head_dim * kPanel<A>);
    top = carver.take<A>(panels * kPanel<A>);
    total = carver.take<A>(panels * kPanel<A>);
    rows = carver.take<IntegerVector<A>>(panels * kTileVectors);
    keys = carver.take<A>(block * shape.head_dim);
    values = carver.take<A>(block * shape.head_dim);
    scores = carver.take<A>(block * kPanel<A>);
  }
};

// The maximum before the first score: finite, so that differences with it and multiples of it stay numbers.
template <class A>
inline constexpr A kBelowAll = sizeof(A) == 4 ? A(-1e30f) : A(-1e300);

// a * b rounded on its own, never fused with what follows.
template <class V, class A>
ESPALIER_SIMD_INLINE V rounded_product(V a, A b) {
  V product = a * b;
  asm("" : "+x"(product));
  return product;
}

// Scores that a lane may not see become -inf; top[v] = max(top[v], what remains).
template <class A>
void mask_scores(const KeyBlock& block, const Visible& seen, const IntegerVector<A>* rows, int vectors, A* s, A* top) {
  const Vector<A> hidden = broadcast(-static_cast<A>(__builtin_inf()));
  for (int v = 0; v < vectors; ++v) {
    Vector<A> best = load(top + v * kLanes<A>);
    for (std::int64_t j = seen.first; j < seen.end; ++j) {
      A* at = s + (j - seen.first) * kPanel<A> + v * kLanes<A>;
      const Vector<A> kept = sees(rows[v], block.begin + j, block.ends[j]) ? load(at) : hidden;
      best = max(kept, best);
      store(at, kept);
    }
    store(top + v * kLanes<A>, best);
  }
}

// S becomes P = e^(scale S - m'); alpha = e^(m - m'). Maxima are kept of S, so that m = scale * maximum is rounded the
// same way whenever it is formed.
template <int vectors, class A>
__attribute__((noinline)) void softmax_step(std::int64_t n, A scale, A* s, const A* top, A* old_top, A* total,
                                            A* alpha) {
  Vector<A> m[vectors], sum[vectors] = {};
#pragma GCC unroll 8
  for (int v = 0; v < vectors; ++v) m[v] = rounded_product(load(top + v * kLanes<A>), scale);
  for (std::int64_t j = 0; j < n; ++j)
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) {
      A* at = s + j * kPanel<A> + v * kLanes<A>;
      const Vector<A> p = exp_nonpositive(load(at) * scale - m[v]);
      sum[v] += p;
      store(at, p);
    }
#pragma GCC unroll 8
  for (int v = 0; v < vectors; ++v) {
    const int lane = v * kLanes<A>;
    const Vector<A> a = exp_nonpositive(rounded_product(load(old_top + lane), scale) - m[v]);
    store(alpha + lane, a);
    store(total + lane, load(total + lane) * a + sum[v]);
    store(old_top + lane, load(top + lane));
  }
}

template <class A>
void panel_step(const Shape& shape, const PanelPlace<A>& p, const KeyBlock& block, const Visible& seen,
                std::int64_t index, const Scratch<A>& z) {
  constexpr int W = kPanel<A>;
  const std::int64_t D = shape.head_dim, n = seen.end - seen.first;
  alignas(64) A top[W], alpha[W];
  __builtin_memcpy(top, z.top + index * W, sizeof(top));
  with_vectors(p.vectors, [&](auto count) {
    constexpr int vectors = decltype(count)::value;
    const A* keys = z.keys + seen.first * D;
    const A* queries = z.queries + index * D * W;
    if (seen.masked) {
      scores<vectors, false>(n, D, keys, queries, z.scores, top);
      mask_scores(block, seen, z.rows + index * kTileVectors, vectors, z.scores, top);
    } else {
      scores<vectors, true>(n, D, keys, queries, z.scores, top);
    }
    softmax_step<vectors, A>(n, magnitude<A>(shape.scale), z.scores, top, z.top + index * W, z.total + index * W,
                             alpha);
    weighted<vectors, true>(n, D, z.values + seen.first * D, z.scores, z.sums + index * D * W, alpha);
  });
}

template <class T>
void finish_panel(const Shape& shape, const PanelPlace<accumulator_t<T>>& p, std::int64_t head, std::int64_t index,
                  const Scratch<accumulator_t<T>>& z, Rows<T> out, accumulator_t<T>* lse_HQ) {
  using A = accumulator_t<T>;
  constexpr int W = kPanel<A>;
  const std::int64_t group = shape.heads / shape.kv_heads;
  alignas(64) A inverse[W], lse[W];
  for (int v = 0; v < p.vectors; ++v) {
    const int lane = v * kLanes<A>;
    const Vector<A> total = load(z.total + index * W + lane), top = load(z.top + index * W + lane);
    store(inverse + lane, static_cast<A>(1) / total);
    store(lse + lane, rounded_product(top, magnitude<A>(shape.scale)) + log(total));
  }
  unpack_panel<T>(shape, z.sums + index * shape.head_dim * W, inverse, head, p, out);
  for (int lane = 0; lane < p.count; ++lane) {
    const std::int64_t at = p.first + lane;
    lse_HQ[(head * group + at % group) * shape.query_rows + at / group] = lse[lane];
  }
}

template <class T>
void forward_task(const Shape& shape, const Inputs<T>& in, Rows<T> out, accumulator_t<T>* lse_HQ, std::int64_t head,
                  std::int64_t lane_begin, std::int64_t lane_end, const Scratch<accumulator_t<T>>& z) {
  using A = accumulator_t<T>;
  constexpr int W = kPanel<A>;
  const std::int64_t D = shape.head_dim, size = key_block<A>(D), panels = ceil_div(lane_end - lane_begin, W);
  const auto place = [&](std::int64_t i) { return panel_at<A>(shape, lane_begin + i * W, lane_end); };
  for (std::int64_t i = 0; i < panels; ++i) {
    const PanelPlace<A> p = place(i);
    pack_panel<T>(shape, in.q, head, p, sign<A>(shape.scale), z.queries + i * D * W);
    lane_rows(shape, p, reinterpret_cast<decltype(IntegerVector<A>{}[0] + 0)*>(z.rows + i * kTileVectors));
    for (int v = 0; v < kTileVectors; ++v) {
      store(z.top + i * W + v * kLanes<A>, broadcast(kBelowAll<A>));
      store(z.total + i * W + v * kLanes<A>, Vector<A>{});
    }
    __builtin_memset(z.sums + i * D * W, 0, sizeof(A) * static_cast<std::size_t>(D * W));
  }
  const std::int32_t row_min = place(0).row_min, row_max = place(panels - 1).row_max;
  for (std::int64_t b = 0; b < block_count(shape, size); ++b) {
    const KeyBlock block = block_at(shape, b, size);
    const Visible by_any = visible(block, row_min, row_max);
    if (by_any.first >= by_any.end) continue;
    const Rows<const T> keys = block.ends ? in.own_k : in.path_k, values = block.ends ? in.own_v : in.path_v;
    for (std::int64_t j = by_any.first; j < by_any.end; ++j) {
      copy_row(keys.data + (block.begin + j) * keys.stride + head * D, D, z.keys + j * D, D);
      copy_row(values.data + (block.begin + j) * values.stride + head * D, D, z.values + j * D, D);
    }
    for (std::int64_t i = 0; i < panels; ++i) {
      const PanelPlace<A> p = place(i);
      const Visible seen = visible(block, p.row_min, p.row_max);
      if (seen.first < seen.end) panel_step<A>(shape, p, block, seen, i, z);
    }
  }
  for (std::int64_t i = 0; i < panels; ++i) finish_panel<T>(shape, place(i), head, i, z, out, lse_HQ);
}

template <class T>
std::size_t forward_scratch(const Shape& shape, int threads) {
  Carver carver(nullptr);
  Scratch<accumulator_t<T>>(carver, shape, task_panels<accumulator_t<T>>(shape, threads));
  return carver.used() * static_cast<std::size_t>(threads);
}

template <class T>
void run_forward(const Shape& shape, const Inputs<T>& in, Rows<T> out, accumulator_t<T>* lse_HQ, void* scratch,
                 int threads) {
  using A = accumulator_t<T>;
  const std::int64_t panels = task_panels<A>(shape, threads), step = panels * kPanel<A>;
  const std::int64_t lanes = shape.query_rows * (shape.heads / shape.kv_heads);
  const std::int64_t stretches = ceil_div(lanes, step),
                     each = static_cast<std::int64_t>(forward_scratch<T>(shape, threads)) / threads;
#pragma omp parallel num_threads(threads)
  {
    Carver carver(static_cast<char*>(scratch) + omp_get_thread_num() * each);
    const Scratch<A> z(carver, shape, panels);
    // Late stretches see the most own keys: they go first.
#pragma omp for schedule(dynamic, 1)
    for (std::int64_t task = 0; task < stretches * shape.kv_heads; ++task) {
      const std::int64_t begin = (stretches - 1 - task / shape.kv_heads) * step;
      forward_task<T>(shape, in, out, lse_HQ, task % shape.kv_heads, begin, lesser(begin + step, lanes), z);
    }
  }
}

}  // namespace

template <class T>
void add_forward(attention::cpu::Kernels<T>& kernels);
template <class T>
void add_forward(attention::cpu::Kernels<T>& kernels) {
  kernels.forward_scratch = forward_scratch<T>;
  kernels.forward = run_forward<T>;
}
template void add_forward<float>(attention::cpu::Kernels<float>&);
template void add_forward<double>(attention::cpu::Kernels<double>&);
template void add_forward<bfloat16>(attention::cpu::Kernels<bfloat16>&);

}  // namespace espalier::ESPALIER_SIMD
