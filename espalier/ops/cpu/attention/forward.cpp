// Forward of shared-prefix attention on a CPU; compiled once per instruction set.
//
//   per panel and key block: S = K Q^T, m' = max(m, scale S), P = e^(scale S - m'), a = e^(m - m'),
//   l = l a + sum P, O^T = O^T a + V^T P;  at the end out = O / l, lse = m + log l   (mathematics, section 5)
// Where keys stay whole, exponentials are taken apart into powers of two, so that a product with a is exact and l and O
// are one chain each over the keys that a lane sees, whatever blocks these come in   (mathematics, section 18)
//
// A task is a stretch of lanes of one key/value head. It walks the key blocks once, path first, packs each block next
// to the core and meets it with all its panels, so path and own rows share one online softmax and one rounding.
// Where there are too few stretches for the threads (a few queries over a long path), the keys are cut into parts of
// about equal visible keys; a task is then one part of a stretch, and the parts' (m, l, O) are merged in order, unless
// keys are to stay whole.
#include <omp.h>

#include "espalier/base/simd_tanh.h"
#include "espalier/ops/cpu/attention/kernels.h"
#include "espalier/ops/cpu/attention/sets.h"

namespace espalier::ESPALIER_SIMD {
namespace {

// How the work is cut.
struct Cut {
  std::int64_t panels = 0, stretches = 0;  // panels of a stretch, stretches of a head
  std::int64_t parts = 1;                  // parts of the keys
  std::int64_t block = 0;                  // keys of a block
  std::int64_t lanes = 0;                  // of a head
};
template <class O>
Cut cut_of(const Shape& shape, int threads) {
  using A = typename O::A;
  constexpr std::int64_t W = kPanel<A>, kLeastKeys = 512;  // of a part
  Cut c;
  const std::int64_t widest = greater(shape.head_dim, shape.values());
  c.block = O::key_block(widest);
  c.lanes = shape.query_rows * (shape.heads / shape.kv_heads);
  // Queries and sums of a stretch stay near the core beside a key block; small problems are cut into at least four
  // stretches a thread.
  const std::int64_t near = 262144 / static_cast<std::int64_t>(sizeof(A)) / widest / W;
  const std::int64_t fair = ceil_div(c.lanes * shape.kv_heads, 4 * threads * W);
  c.panels = greater(1, lesser(greater(near, 2), fair));
  c.stretches = ceil_div(c.lanes, c.panels * W);
  const std::int64_t tasks = c.stretches * shape.kv_heads;
  if (!shape.keys_whole && threads > 1 && tasks < 2 * threads)
    c.parts = greater(1, lesser(ceil_div(4 * threads, tasks), (shape.path_rows + shape.own_rows) / kLeastKeys));
  return c;
}

// The running softmax of one stretch, or of one part of it.
template <class O>
struct Sums {
  using A = typename O::A;
  A *top, *total, *out;  // [panels][W], [panels][W], [panels][rows(Dv)][W]: maximum of S, l, O^T

  Sums(Carver& carver, const Shape& shape, std::int64_t panels) {
    top = carver.take<A>(panels * kPanel<A>);
    total = carver.take<A>(panels * kPanel<A>);
    out = carver.take<A>(panels * O::rows(shape.values()) * kPanel<A>);
  }
  Sums panel(const Shape& shape, std::int64_t index) const {
    Sums s = *this;
    s.top += index * kPanel<A>;
    s.total += index * kPanel<A>;
    s.out += index * O::rows(shape.values()) * kPanel<A>;
    return s;
  }
  static std::size_t bytes(const Shape& shape, std::int64_t panels) {
    Carver carver(nullptr);
    Sums(carver, shape, panels);
    return carver.used();
  }
};

template <class O>
struct Private {
  using A = typename O::A;
  using Factor = typename O::Factor;
  Factor *queries, *keys, *values;
  A* scores;
  WeightPlaces<Factor> weights;
  LanePlaces<A> places;

  Private(Carver& carver, const Shape& shape, const Cut& c) {
    queries = carver.take<Factor>(c.panels * O::steps(shape.head_dim) * kPanel<A>);
    keys = carver.take<Factor>((c.block + O::rows(1)) * O::steps(shape.head_dim));
    values = carver.take<Factor>(O::across_size(c.block, shape.values()));
    scores = carver.take<A>((c.block + O::rows(1)) * kPanel<A>);
    places = LanePlaces<A>::take(carver, shape, c.panels);
    if constexpr (O::kInPlace)
      weights.by_key = weights.by_lane = scores;
    else
      weights.by_key = carver.take<Factor>(O::steps(c.block) * kPanel<A>);
  }
};

// The maximum before the first score: finite, so that differences with it and multiples of it stay numbers.
template <class A>
inline constexpr A kBelowAll = sizeof(A) == 4 ? A(-1e30f) : A(-1e300);

// Scores that a lane may not see become -inf; top[v] = max(top[v], what remains).
template <class A>
void mask_scores(const Shape& shape, const KeyBlock& block, const Visible& seen, const LanePlaces<A>& lanes, A* s,
                 A* top) {
  const Vector<A> hidden = broadcast(-static_cast<A>(__builtin_inf()));
  for (int v = 0; v < seen.vectors; ++v) {
    Vector<A> best = load(top + v * kLanes<A>);
    for (std::int64_t j = seen.first; j < seen.end; ++j) {
      A* at = s + (j - seen.first) * kPanel<A> + v * kLanes<A>;
      const Vector<A> kept = sees(shape, block, j, lanes, v) ? load(at) : hidden;
      best = max(kept, best);
      store(at, kept);
    }
    store(top + v * kLanes<A>, best);
  }
}

// S = scale s becomes C tanh(S / C) of the soft cap C, in the form s.
template <class A>
void cap_scores(const Shape& shape, const Visible& seen, A* s) {
  const A scale = magnitude<A>(shape.scale), cap = static_cast<A>(shape.soft_cap), in = scale / cap, out = cap / scale;
  for (std::int64_t j = 0; j < seen.keys(); ++j)
    for (int v = 0; v < seen.vectors; ++v) {
      A* at = s + j * kPanel<A> + v * kLanes<A>;
      store(at, tanh_of<A>(load(at) * in) * out);
    }
}

// Scores as weights: P = e^(scale S - m), m = scale max S. Maxima are kept of S, so that m is rounded the same way
// whenever it is formed. A block's weights are summed before they are added to the sum of the blocks before it.
template <class A>
struct Exponentials {
  static constexpr bool kOneChain = false;
  using V = Vector<A>;
  ESPALIER_SIMD_INLINE explicit Exponentials(const Shape& shape) : scale(magnitude<A>(shape.scale)) {}
  ESPALIER_SIMD_INLINE V maximum(V score) const { return score * scale; }
  ESPALIER_SIMD_INLINE V weight(V score, V m) const { return exp_nonpositive(fma(score, scale, -m)); }
  ESPALIER_SIMD_INLINE V factor(V former, V m) const { return exp_nonpositive(former - m); }
  ESPALIER_SIMD_INLINE V lse(V m, V total) const { return m + log(total); }

  A scale;
};

// The same for sums of a defined order: e^(scale S) = 2^n p, m = max n, P = 2^(n - m) p, so that factors are powers of
// two, and the weights of all blocks are one chain.
template <class A>
struct PowersOfTwo {
  static constexpr bool kOneChain = true;
  using V = Vector<A>;
  ESPALIER_SIMD_INLINE explicit PowersOfTwo(const Shape& shape)
      : scale(magnitude<A>(shape.scale)), log2_e(static_cast<A>(magnitude<double>(shape.scale) * 1.4426950408889634)) {}
  ESPALIER_SIMD_INLINE V maximum(V score) const { return whole_exponent(score, log2_e); }
  ESPALIER_SIMD_INLINE V weight(V score, V m) const {
    const V power = maximum(score);
    return times_power(exp_mantissa(score, scale, power), power - m);
  }
  ESPALIER_SIMD_INLINE V factor(V former, V m) const { return times_power(broadcast(A(1)), former - m); }
  ESPALIER_SIMD_INLINE V lse(V m, V total) const { return log_of_power(m, log(total)); }

  A scale, log2_e;  // log2_e: scale log2 e
};

// Calls body with the weights that the problem asks for.
template <class A, class Body>
ESPALIER_SIMD_INLINE void with_weights(const Shape& shape, Body&& body) {
  if (shape.keys_whole)
    body(PowersOfTwo<A>(shape));
  else
    body(Exponentials<A>(shape));
}

// The weights P of a block, alpha = the factor of what is there already, and the new maxima and sums of weights.
template <class O, int vectors, class E, class A>
__attribute__((noinline)) void softmax_step(std::int64_t n, E scale, const A* s,
                                            const WeightPlaces<typename O::Factor>& weights, const A* top, A* old_top,
                                            A* total, A* alpha) {
  Vector<A> m[vectors], sum[vectors] = {};
#pragma GCC unroll 8
  for (int v = 0; v < vectors; ++v) {
    const int lane = v * kLanes<A>;
    m[v] = scale.maximum(load(top + lane));
    store(alpha + lane, scale.factor(scale.maximum(load(old_top + lane)), m[v]));
    store(old_top + lane, load(top + lane));
    if constexpr (E::kOneChain) sum[v] = load(total + lane) * load(alpha + lane);
  }
  const auto weigh = [&](std::int64_t j, int v) __attribute__((always_inline)) {
    const Vector<A> p = scale.weight(load(s + j * kPanel<A> + v * kLanes<A>), m[v]);
    sum[v] += p;
    return p;
  };
  keep_weights<O, vectors>(weights, {}, n, weigh, [](std::int64_t, int, Vector<A> p) { return p; });
#pragma GCC unroll 8
  for (int v = 0; v < vectors; ++v) {
    const int lane = v * kLanes<A>;
    store(total + lane, E::kOneChain ? sum[v] : fma(load(total + lane), load(alpha + lane), sum[v]));
  }
}

// One panel against what it sees of a block.
template <class O>
void panel_step(const Shape& shape, const Cut& c, const KeyBlock& block, const Visible& seen, std::int64_t index,
                const Private<O>& z, const Sums<O>& sums) {
  using A = typename O::A;
  constexpr int W = kPanel<A>;
  const std::int64_t D = shape.head_dim, Dv = shape.values(), n = seen.keys(), lane = seen.vector * kLanes<A>;
  alignas(64) A top[W], alpha[W];
  const auto* keys = z.keys + seen.first * O::steps(D);
  const auto* queries = z.queries + index * O::steps(D) * W + lane;
  with_vectors(seen.vectors, [&](auto count) {
    constexpr int vectors = decltype(count)::value;
    __builtin_memcpy(top, sums.top + lane, sizeof(A) * vectors * kLanes<A>);
    if (seen.masked || shape.soft_cap > 0) {
      O::Products::template scores<vectors, false>(n, O::steps(D), keys, queries, z.scores, top);
      if (shape.soft_cap > 0) cap_scores<A>(shape, seen, z.scores);
      mask_scores(shape, block, seen, z.places.from(index * kTileVectors + seen.vector), z.scores, top);
    } else {
      O::Products::template scores<vectors, true>(n, O::steps(D), keys, queries, z.scores, top);
    }
    with_weights<A>(shape, [&](auto scale) {
      softmax_step<O, vectors>(n, scale, static_cast<const A*>(z.scores), z.weights, static_cast<const A*>(top),
                               sums.top + lane, sums.total + lane, static_cast<A*>(alpha));
    });
    O::Products::template weighted<vectors, true, O::kAcross>(
        O::steps(n), O::rows(Dv), O::across_from(z.values, seen.first, Dv), O::across_stride(c.block, Dv),
        z.weights.by_key, sums.out + lane, alpha);
  });
}

// out and lse of one panel.
template <class O>
void finish_panel(const Shape& shape, const Lanes& p, std::int64_t head, const Sums<O>& sums,
                  Rows<typename O::Element> out, typename O::A* lse_HQ) {
  using A = typename O::A;
  const std::int64_t group = shape.heads / shape.kv_heads;
  alignas(64) A inverse[kPanel<A>], lse[kPanel<A>];
  for (int lane = 0; lane < p.count; lane += kLanes<A>) {
    const Vector<A> total = load(sums.total + lane), top = load(sums.top + lane);
    store(inverse + lane, static_cast<A>(1) / total);
    with_weights<A>(shape, [&](auto scale) { store(lse + lane, scale.lse(scale.maximum(top), total)); });
  }
  unpack_panel<typename O::Element>(shape.of_values(), sums.out, inverse, head, p, out);
  for (int lane = 0; lane < p.count; ++lane) {
    const std::int64_t at = p.first + lane;
    lse_HQ[(head * group + at % group) * shape.query_rows + at / group] = lse[lane];
  }
}

// Adds the sums of `parts` parts, one panel each and `apart` bytes apart, into the first:
//   m = max m_p, f_p = e^(m_p - m), l = sum f_p l_p, O = sum f_p O_p
template <class O>
void merge_parts(const Shape& shape, std::int64_t parts, std::size_t apart, const Sums<O>& first) {
  using A = typename O::A;
  constexpr int W = kPanel<A>;
  const auto of = [&](A* x, std::int64_t part) {
    return reinterpret_cast<A*>(reinterpret_cast<char*>(x) + static_cast<std::size_t>(part) * apart);
  };
  const Exponentials<A> scale(shape);  // keys that stay whole have no parts
  for (int lane = 0; lane < W; lane += kLanes<A>) {
    Vector<A> top = load(first.top + lane), total{};
    for (std::int64_t part = 1; part < parts; ++part) top = max(load(of(first.top, part) + lane), top);
    for (std::int64_t part = 0; part < parts; ++part) {
      const Vector<A> f = scale.factor(scale.maximum(load(of(first.top, part) + lane)), scale.maximum(top));
      total = fma(f, load(of(first.total, part) + lane), total);
      for (std::int64_t d = 0; d < shape.values(); ++d) {
        A* to = first.out + d * W + lane;
        store(to, part == 0 ? f * load(to) : fma(f, load(of(first.out, part) + d * W + lane), load(to)));
      }
    }
    store(first.top + lane, top);
    store(first.total + lane, total);
  }
}

// The blocks of part `part`: those whose middle, counted in visible keys, falls into its share.
struct Part {
  std::int64_t index = 0, parts = 1, all = 0, done = 0;

  bool takes(std::int64_t keys) {
    const std::int64_t middle = 2 * done + keys;
    done += keys;
    return parts == 1 || middle * parts / (2 * greater(all, 1)) == index;
  }
};

// One part of a stretch: lanes [begin, end) of head `head`.
template <class O>
void forward_task(const Shape& shape, const Cut& c, const Inputs<typename O::Element>& in, const KeyBlocks& blocks,
                  std::int64_t head, std::int64_t begin, std::int64_t end, Part part, const Private<O>& z,
                  const Sums<O>& sums) {
  using A = typename O::A;
  using T = typename O::Element;
  constexpr int W = kPanel<A>;
  const std::int64_t D = shape.head_dim, Dv = shape.values(), panels = ceil_div(end - begin, W);
  for (std::int64_t i = 0; i < panels; ++i) {
    const Lanes p = panel_at<A>(shape, begin, end, i);
    O::pack_columns(shape, in.q, head, p, sign<A>(shape.scale), z.queries + i * O::steps(D) * W);
    z.places.from(i * kTileVectors).fill(shape, p);
    for (int lane = 0; lane < W; lane += kLanes<A>) {
      store(sums.top + i * W + lane, broadcast(kBelowAll<A>));
      store(sums.total + i * W + lane, Vector<A>{});
    }
  }
  __builtin_memset(sums.out, 0, sizeof(A) * static_cast<std::size_t>(panels * O::rows(Dv) * W));
  const Lanes all = lanes_at(shape, begin, end);
  const auto seen_by = [&](const KeyBlock& block, const Lanes& lanes) {
    return visible<A>(shape, block, lanes, O::kKeyStep, O::kVectorStep);
  };
  if (part.parts > 1)
    for (std::int64_t b = 0; b < blocks.count(); ++b) part.all += seen_by(blocks.at(b), all).keys();
  for (std::int64_t b = 0; b < blocks.count(); ++b) {
    const KeyBlock block = blocks.at(b);
    const Visible by_any = seen_by(block, all);
    if (by_any.end == 0 || !part.takes(by_any.keys())) continue;
    const Rows<const T> keys = block.ends ? in.own_k : in.path_k, values = block.ends ? in.own_v : in.path_v;
    O::pack_keys(keys.data + block.begin * keys.stride + head * D, keys.stride, by_any.first, by_any.end, D, z.keys);
    O::pack_across(values.data + block.begin * values.stride + head * Dv, values.stride, by_any.first, by_any.end,
                   c.block, Dv, z.values);
    for (std::int64_t i = 0; i < panels; ++i) {
      const Visible seen = seen_by(block, panel_at<A>(shape, begin, end, i));
      if (seen.end > 0) panel_step<O>(shape, c, block, seen, i, z, sums.panel(shape, i));
    }
  }
}

// The caller's memory: block ranges, the sums of all parts where there are several, then one piece a thread.
template <class O>
struct Layout {
  std::size_t shared = 0, part = 0, thread = 0;  // bytes: before the threads' pieces, of one part's sums, of a piece

  Layout(const Shape& shape, const Cut& c) {
    Carver carver(nullptr);
    KeyBlocks(carver, shape, c.block);
    part = Sums<O>::bytes(shape, c.panels);
    shared = carver.used();
    if (c.parts > 1) shared += part * static_cast<std::size_t>(c.stretches * shape.kv_heads * c.parts);
    Carver of_thread(nullptr);
    Private<O>(of_thread, shape, c);
    thread = of_thread.used() + part;
  }
};

template <class O>
std::size_t forward_scratch(const Shape& shape, int threads) {
  const Layout<O> layout(shape, cut_of<O>(shape, threads));
  return layout.shared + layout.thread * static_cast<std::size_t>(threads);
}

template <class O>
void run_forward(const Shape& shape, const Inputs<typename O::Element>& in, Rows<typename O::Element> out,
                 typename O::A* lse_HQ, void* scratch, int threads) {
  using A = typename O::A;
  const Cut c = cut_of<O>(shape, threads);
  const Layout<O> layout(shape, c);
  char* memory = static_cast<char*>(scratch);
  Carver carver(memory);
  const KeyBlocks blocks(carver, shape, c.block);
  const std::size_t parts_at = carver.used();
  const std::int64_t step = c.panels * kPanel<A>, stretches = c.stretches * shape.kv_heads;
  const auto sums_of = [&](std::int64_t stretch, std::int64_t part) {
    Carver of_part(memory + parts_at + layout.part * static_cast<std::size_t>(stretch * c.parts + part));
    return Sums<O>(of_part, shape, c.panels);
  };
#pragma omp parallel num_threads(threads)
  {
    char* piece = memory + layout.shared + layout.thread * static_cast<std::size_t>(omp_get_thread_num());
    // Products in tiles read behind the keys: what none has filled yet must be numbers.
    if constexpr (O::Products::kSteps > 1) __builtin_memset(piece, 0, layout.thread);
    Carver of_thread(piece);
    const Private<O> z(of_thread, shape, c);
    const Sums<O> own(of_thread, shape, c.panels);
    [[maybe_unused]] const typename O::Products::Session session;
#pragma omp for schedule(static)
    for (std::int64_t b = 0; b < blocks.own_count(); ++b) blocks.find_range(b);
      // Late stretches see the most own keys: they go first.
#pragma omp for schedule(dynamic, 1)
    for (std::int64_t task = 0; task < stretches * c.parts; ++task) {
      const std::int64_t stretch = task / c.parts, head = stretch % shape.kv_heads;
      const std::int64_t begin = (c.stretches - 1 - stretch / shape.kv_heads) * step;
      const std::int64_t end = lesser(begin + step, c.lanes);
      const Sums<O> sums = c.parts > 1 ? sums_of(stretch, task % c.parts) : own;
      forward_task<O>(shape, c, in, blocks, head, begin, end, Part{task % c.parts, c.parts}, z, sums);
      for (std::int64_t i = 0; c.parts == 1 && i < ceil_div(end - begin, kPanel<A>); ++i)
        finish_panel<O>(shape, panel_at<A>(shape, begin, end, i), head, sums.panel(shape, i), out, lse_HQ);
    }
    if (c.parts > 1)
#pragma omp for schedule(static)
      for (std::int64_t n = 0; n < stretches * c.panels; ++n) {
        const std::int64_t stretch = n / c.panels, head = stretch % shape.kv_heads, i = n % c.panels;
        const std::int64_t begin = (c.stretches - 1 - stretch / shape.kv_heads) * step;
        const std::int64_t end = lesser(begin + step, c.lanes);
        if (begin + i * kPanel<A> >= end) continue;
        const Sums<O> sums = sums_of(stretch, 0).panel(shape, i);
        merge_parts<O>(shape, c.parts, layout.part, sums);
        finish_panel<O>(shape, panel_at<A>(shape, begin, end, i), head, sums, out, lse_HQ);
      }
  }
}

}  // namespace

template <class T>
void add_forward(attention::cpu::Kernels<T>& kernels);
#define ESPALIER_ADD(T, O)                                    \
  template <>                                                 \
  void add_forward<T>(attention::cpu::Kernels<T> & kernels) { \
    kernels.forward_scratch = forward_scratch<O>;             \
    kernels.forward = run_forward<O>;                         \
  }
ESPALIER_EACH_TYPE(ESPALIER_ADD)

}  // namespace espalier::ESPALIER_SIMD
