// Backward of shared-prefix attention on a CPU; compiled once per instruction set.
//
//   per panel and key block: S = K Q^T, P = e^(scale S - lse), dP = V dO^T, dS = P o (dP - D), D_i = dO_i . out_i
//   gV += P^T dO, gK += scale dS^T Q, dQ^T += K^T dS                                        (mathematics, section 1)
//
// Query rows are taken in stretches whose packed panels fit kSharedBytes. For each stretch: all threads pack
// panels; then units (key/value head x part of the keys) run, each with its own dQ; then the parts' dQ are added in
// order and written. A head's keys are cut into parts of equal visible pairs. Every key belongs to one unit of a
// stretch: no atomics, and an order of additions that is the same for all numbers of threads up to kUnits.
#include <omp.h>

#include "espalier/base/simd_tanh.h"
#include "espalier/ops/cpu/attention/kernels.h"
#include "espalier/ops/cpu/attention/sets.h"

namespace espalier::ESPALIER_SIMD {
namespace {

// Every key block goes through all panels of a stretch: larger stretches fall out of the cache that cores share.
inline constexpr std::int64_t kSharedBytes = std::int64_t{4} << 20;
// Least number of units; more threads get the next power of two.
inline constexpr std::int64_t kUnits = 16;

// How the work is cut.
struct Cut {
  std::int64_t group = 0;                      // heads per key/value head
  std::int64_t padded = 0, padded_values = 0;  // D and Dv in whole vectors
  std::int64_t parts = 0;                      // parts of the keys of one head
  std::int64_t panels = 0;                     // panels of one head in a stretch
  std::int64_t block = 0, blocks = 0;          // keys of a block, blocks of all keys
};
// Numbers of a packed panel with heads of this size, and of dQ of one.
template <class O>
std::int64_t columns_size(std::int64_t head_dim) {
  return O::steps(head_dim) * kPanel<typename O::A>;
}
template <class O>
std::int64_t lanes_size(std::int64_t padded) {
  return O::steps(kPanel<typename O::A>) * padded;
}
template <class O>
std::int64_t slope_sums_size(const Shape& shape) {
  return O::rows(shape.head_dim) * kPanel<typename O::A>;
}
template <class O>
Cut cut_of(const Shape& shape, int threads) {
  using A = typename O::A;
  Cut c;
  c.group = shape.heads / shape.kv_heads;
  c.padded = whole_vectors<A>(shape.head_dim);
  c.padded_values = whole_vectors<A>(shape.values());
  c.block = O::key_block(greater(shape.head_dim, shape.values()));
  c.blocks = ceil_div(shape.path_rows, c.block) + ceil_div(shape.own_rows, c.block);
  std::int64_t units = kUnits;
  while (units < threads) units *= 2;
  c.parts = greater(1, lesser(ceil_div(units, shape.kv_heads), c.blocks));
  const std::int64_t factors = columns_size<O>(shape.head_dim) + columns_size<O>(shape.values()) +
                               lanes_size<O>(c.padded) + lanes_size<O>(c.padded_values);
  const std::int64_t panel = factors * static_cast<std::int64_t>(sizeof(typename O::Factor)) +
                             slope_sums_size<O>(shape) * c.parts * static_cast<std::int64_t>(sizeof(A));
  const std::int64_t all = ceil_div(shape.query_rows * c.group, kPanel<A>);
  c.panels = greater(1, lesser(all, kSharedBytes / (panel * shape.kv_heads)));
  return c;
}

// The factors of one panel, packed once per stretch and read by all units.
template <class O>
struct Packed {
  typename O::Factor *queries_t, *grads_t;  // columns: Q^T (signed as the scale) and dO^T
  typename O::Factor *queries, *grads;      // lanes: Q and dO
  typename O::A *lse, *dots;                // [W]: lse and D_i
  LanePlaces<typename O::A> places;         // of its lanes

  // From vector `vector` on.
  Packed from(int vector, const Cut& c) const {
    const std::int64_t lane = vector * kLanes<typename O::A>, step = O::steps(lane);
    return {queries_t + lane, grads_t + lane, queries + step * c.padded, grads + step * c.padded_values,
            lse + lane,       dots + lane,    places.from(vector)};
  }
};

template <class O>
struct Shared {
  using A = typename O::A;
  using Factor = typename O::Factor;
  KeyBlocks blocks;
  Factor *queries_t, *grads_t, *queries, *grads;
  A *lse, *dots, *partial;
  LanePlaces<A> places;
  std::int64_t* bounds;  // [parts + 1] blocks

  Shared(Carver& carver, const Shape& shape, const Cut& c) : blocks(carver, shape, c.block) {
    const std::int64_t n = shape.kv_heads * c.panels;
    queries_t = carver.take<Factor>(n * columns_size<O>(shape.head_dim));
    grads_t = carver.take<Factor>(n * columns_size<O>(shape.values()));
    queries = carver.take<Factor>(n * lanes_size<O>(c.padded));
    grads = carver.take<Factor>(n * lanes_size<O>(c.padded_values));
    lse = carver.take<A>(n * kPanel<A>);
    dots = carver.take<A>(n * kPanel<A>);
    partial = carver.take<A>(n * slope_sums_size<O>(shape) * c.parts);
    places = LanePlaces<A>::take(carver, shape, n);
    bounds = carver.take<std::int64_t>(c.parts + 1);
  }
  // Panel `index` of head `head`.
  Packed<O> panel(const Shape& shape, const Cut& c, std::int64_t head, std::int64_t index) const {
    const std::int64_t n = head * c.panels + index;
    return {queries_t + n * columns_size<O>(shape.head_dim),
            grads_t + n * columns_size<O>(shape.values()),
            queries + n * lanes_size<O>(c.padded),
            grads + n * lanes_size<O>(c.padded_values),
            lse + n * kPanel<A>,
            dots + n * kPanel<A>,
            places.from(n * kTileVectors)};
  }
  A* partial_of(const Shape& shape, const Cut& c, std::int64_t head, std::int64_t part, std::int64_t index) const {
    return partial + ((head * c.parts + part) * c.panels + index) * slope_sums_size<O>(shape);
  }
};

template <class O>
struct Private {
  using A = typename O::A;
  using Factor = typename O::Factor;
  Factor *keys, *keys_across, *values;
  A *grad_keys, *grad_values, *scores, *slopes;
  WeightPlaces<Factor> weights, slope_weights;  // P and dS

  Private(Carver& carver, const Shape& shape, const Cut& c) {
    const std::int64_t rows = c.block + O::rows(1);
    keys = keys_across = carver.take<Factor>(rows * O::steps(shape.head_dim));
    values = carver.take<Factor>(rows * O::steps(shape.values()));
    grad_keys = carver.take<A>(rows * c.padded);
    grad_values = carver.take<A>(rows * c.padded_values);
    scores = carver.take<A>(rows * kPanel<A>);
    slopes = carver.take<A>(rows * kPanel<A>);
    if constexpr (O::kInPlace) {
      weights.by_lane = scores;
      slope_weights.by_key = slope_weights.by_lane = slopes;
    } else {
      keys_across = carver.take<Factor>(O::across_size(c.block, shape.head_dim));
      weights.by_lane = carver.take<Factor>(rows * O::steps(kPanel<A>));
      slope_weights.by_lane = carver.take<Factor>(rows * O::steps(kPanel<A>));
      slope_weights.by_key = carver.take<Factor>(O::steps(c.block) * kPanel<A>);
    }
  }
  static std::size_t bytes(const Shape& shape, const Cut& c) {
    Carver carver(nullptr);
    Private(carver, shape, c);
    return carver.used();
  }
};

template <class O>
void pack(const Shape& shape, const Cut& c, const Inputs<typename O::Element>& in, Rows<const typename O::Element> out,
          const typename O::A* lse_HQ, Rows<const typename O::Element> grad_out, std::int64_t head, const Lanes& p,
          const Packed<O>& to) {
  using A = typename O::A;
  using T = typename O::Element;
  const Shape values = shape.of_values();
  O::pack_columns(shape, in.q, head, p, sign<A>(shape.scale), to.queries_t);
  O::pack_columns(values, grad_out, head, p, A(1), to.grads_t);
  O::pack_lanes(shape, in.q, head, p, to.queries, c.padded);
  O::pack_lanes(values, grad_out, head, p, to.grads, c.padded_values);
  to.places.fill(shape, p);
  for (int lane = 0; lane < p.count; ++lane) {
    const std::int64_t at = p.first + lane;
    const T *grad = lane_row(values, grad_out, head, at), *result = lane_row(values, out, head, at);
    Vector<A> dot{};
    for_lanes<T>(values.head_dim, [&](std::int64_t d, int count) {
      dot = fma(load_some(grad + d, count), load_some(result + d, count), dot);
    });
    to.dots[lane] = sum(dot);
    to.lse[lane] = lse_HQ[(head * c.group + at % c.group) * shape.query_rows + at / c.group];
  }
  for (int lane = p.count; lane < kPanel<A>; ++lane) to.dots[lane] = to.lse[lane] = 0;
}

// From S and dP: P = e^(scale S - lse), 0 where unseen; dS = P (dP - D).
template <class O, int vectors, bool masked, class A>
__attribute__((noinline)) void softmax_slopes(const Shape& shape, const KeyBlock& block, const Visible& seen,
                                              const Packed<O>& panel, A scale, const Private<O>& z) {
  Vector<A> lse[vectors], dots[vectors];
#pragma GCC unroll 8
  for (int v = 0; v < vectors; ++v) {
    lse[v] = load(panel.lse + v * kLanes<A>);
    dots[v] = load(panel.dots + v * kLanes<A>);
  }
  const auto at = [](std::int64_t j, int v) { return j * kPanel<A> + v * kLanes<A>; };
  const auto weight = [&](std::int64_t j, int v) __attribute__((always_inline)) {
    const Vector<A> p = exp_nonpositive(fma(load(z.scores + at(j, v)), scale, -lse[v]));
    if constexpr (masked) {
      return sees(shape, block, seen.first + j, panel.places, v) ? p : Vector<A>{};
    } else {
      return p;
    }
  };
  keep_weights<O, vectors>(
      z.weights, z.slope_weights, seen.keys(),
      weight, [&](std::int64_t j, int v, Vector<A> p) __attribute__((always_inline)) {
        return p * (load(z.slopes + at(j, v)) - dots[v]);
      });
}

// Turns s and dP of uncapped scores S = scale s into the capped ones, with t = tanh(S / C):
//   scale s' = C t,  dP' - D = (dP - D) (1 - t^2), so that dS' is the gradient of S
template <class O, class A>
void cap_scores(const Shape& shape, const Visible& seen, const Packed<O>& panel, const Private<O>& z) {
  const A scale = magnitude<A>(shape.scale), cap = static_cast<A>(shape.soft_cap), in = scale / cap, out = cap / scale;
  for (std::int64_t j = 0; j < seen.keys(); ++j)
    for (int v = 0; v < seen.vectors; ++v) {
      const std::int64_t at = j * kPanel<A> + v * kLanes<A>;
      const Vector<A> t = tanh_of<A>(load(z.scores + at) * in), dot = load(panel.dots + v * kLanes<A>);
      store(z.scores + at, t * out);
      store(z.slopes + at, fma(load(z.slopes + at) - dot, fma(-t, t, 1), dot));
    }
}

// One panel against what it sees of a block.
template <class O>
void panel_step(const Shape& shape, const Cut& c, const Lanes& p, const Packed<O>& whole, const KeyBlock& block,
                const Visible& seen, const Private<O>& z, typename O::A* grad_queries_t) {
  using A = typename O::A;
  const std::int64_t D = shape.head_dim, Dv = shape.values(), n = seen.keys(), lane = seen.vector * kLanes<A>;
  const std::int64_t lanes = lesser(p.count - lane, seen.vectors * kLanes<A>);
  const Packed<O> panel = whole.from(seen.vector, c);
  with_vectors(seen.vectors, [&](auto count) {
    constexpr int vectors = decltype(count)::value;
    const auto products = [&](std::int64_t steps, const auto* left, const auto* right, A* to) {
      O::Products::template scores<vectors, false>(n, steps, left + seen.first * steps, right, to,
                                                   static_cast<A*>(nullptr));
    };
    products(O::steps(D), z.keys, panel.queries_t, z.scores);
    products(O::steps(Dv), z.values, panel.grads_t, z.slopes);
    if (shape.soft_cap > 0) cap_scores<O, A>(shape, seen, panel, z);
    const A scale = magnitude<A>(shape.scale);
    if (seen.masked)
      softmax_slopes<O, vectors, true>(shape, block, seen, panel, scale, z);
    else
      softmax_slopes<O, vectors, false>(shape, block, seen, panel, scale, z);
    O::Products::template weighted<vectors, false, O::kAcross>(
        O::steps(n), O::rows(D), O::across_from(z.keys_across, seen.first, D), O::across_stride(c.block, D),
        z.slope_weights.by_key, grad_queries_t + lane, static_cast<const A*>(nullptr));
  });
  const std::int64_t stride = O::steps(kPanel<A>);
  O::Products::outer(n, O::steps(lanes), z.weights.by_lane, stride, panel.grads,
                     z.grad_values + seen.first * c.padded_values, c.padded_values);
  O::Products::outer(n, O::steps(lanes), z.slope_weights.by_lane, stride, panel.queries,
                     z.grad_keys + seen.first * c.padded, c.padded);
}

// Lanes [begin, end) of every head.
struct Stretch {
  std::int64_t begin = 0, end = 0, panels = 0;
};

// One unit: blocks [bounds[part], bounds[part + 1]) of head `head` against all panels of the stretch.
template <class O>
void run_unit(const Shape& shape, const Cut& c, const Inputs<typename O::Element>& in,
              const Gradients<typename O::Element>& grads, const Stretch& stretch, std::int64_t head, std::int64_t part,
              const Shared<O>& shared, const Private<O>& z) {
  using A = typename O::A;
  using T = typename O::Element;
  const std::int64_t D = shape.head_dim, Dv = shape.values();
  __builtin_memset(shared.partial_of(shape, c, head, part, 0), 0,
                   sizeof(A) * static_cast<std::size_t>(stretch.panels * slope_sums_size<O>(shape)));
  for (std::int64_t b = shared.bounds[part]; b < shared.bounds[part + 1]; ++b) {
    const KeyBlock block = shared.blocks.at(b);
    const Rows<const T> keys = block.ends ? in.own_k : in.path_k, values = block.ends ? in.own_v : in.path_v;
    const Rows<A> grad_k = block.ends ? grads.own_k : grads.path_k, grad_v = block.ends ? grads.own_v : grads.path_v;
    bool packed = false;
    for (std::int64_t i = 0; i < stretch.panels; ++i) {
      const Lanes p = panel_at<A>(shape, stretch.begin, stretch.end, i);
      const Visible seen = visible<A>(shape, block, p, O::kKeyStep, O::kVectorStep);
      if (seen.end == 0) continue;
      if (!packed) {
        const T* key = keys.data + block.begin * keys.stride + head * D;
        const T* value = values.data + block.begin * values.stride + head * Dv;
        O::pack_keys(key, keys.stride, 0, block.count, D, z.keys);
        O::pack_keys(value, values.stride, 0, block.count, Dv, z.values);
        if constexpr (!O::kInPlace) O::pack_across(key, keys.stride, 0, block.count, c.block, D, z.keys_across);
        __builtin_memset(z.grad_keys, 0, sizeof(A) * static_cast<std::size_t>(block.count * c.padded));
        __builtin_memset(z.grad_values, 0, sizeof(A) * static_cast<std::size_t>(block.count * c.padded_values));
        packed = true;
      }
      panel_step<O>(shape, c, p, shared.panel(shape, c, head, i), block, seen, z,
                    shared.partial_of(shape, c, head, part, i));
    }
    if (!packed) continue;
    add_rows<A>(block.count, D, z.grad_keys, c.padded, static_cast<A>(shape.scale),
                grad_k.data + block.begin * grad_k.stride + head * D, grad_k.stride);
    add_rows<A>(block.count, Dv, z.grad_values, c.padded_values, A(1),
                grad_v.data + block.begin * grad_v.stride + head * Dv, grad_v.stride);
  }
}

// Cuts the blocks into parts of about equal work: keys times vectors of lanes.
template <class O>
void balance(const Shape& shape, const Cut& c, const Stretch& stretch, const Shared<O>& shared) {
  using A = typename O::A;
  const auto work = [&](std::int64_t b) {
    const KeyBlock block = shared.blocks.at(b);
    std::int64_t total = 0;
    for (std::int64_t i = 0; i < stretch.panels; ++i) {
      const Lanes p = panel_at<A>(shape, stretch.begin, stretch.end, i);
      const Visible seen = visible<A>(shape, block, p, O::kKeyStep, O::kVectorStep);
      total += seen.keys() * seen.vectors;
    }
    return total;
  };
  std::int64_t all = 0, done = 0, part = 0;
  if (c.parts > 1)
    for (std::int64_t b = 0; b < c.blocks; ++b) all += work(b);
  shared.bounds[0] = 0;
  for (std::int64_t b = 0; b < c.blocks && c.parts > 1; ++b) {
    const std::int64_t here = work(b);
    // A bound stands before the block whose middle passes the part's share.
    while (part + 1 < c.parts && (2 * done + here) * c.parts >= 2 * (part + 1) * all && b > 0)
      shared.bounds[++part] = b;
    done += here;
  }
  while (part < c.parts) shared.bounds[++part] = c.blocks;
}

// dQ of one panel: the parts' sums.
template <class O>
void finish(const Shape& shape, const Cut& c, const Stretch& stretch, std::int64_t head, std::int64_t index,
            const Shared<O>& shared, Rows<typename O::Element> grad_q) {
  using A = typename O::A;
  constexpr int W = kPanel<A>;
  A* total = shared.partial_of(shape, c, head, 0, index);
  for (std::int64_t part = 1; part < c.parts; ++part)
    add_rows<A>(shape.head_dim, W, shared.partial_of(shape, c, head, part, index), W, A(1), total, W);
  alignas(64) A factor[W];
  for (int lane = 0; lane < W; ++lane) factor[lane] = static_cast<A>(shape.scale);
  unpack_panel<typename O::Element>(shape, total, factor, head, panel_at<A>(shape, stretch.begin, stretch.end, index),
                                    grad_q);
}

template <class O>
std::size_t backward_scratch(const Shape& shape, int threads) {
  const Cut c = cut_of<O>(shape, threads);
  Carver carver(nullptr);
  Shared<O>(carver, shape, c);
  return carver.used() + Private<O>::bytes(shape, c) * static_cast<std::size_t>(threads);
}

template <class O>
void run_backward(const Shape& shape, const Inputs<typename O::Element>& in, Rows<const typename O::Element> out,
                  const typename O::A* lse_HQ, Rows<const typename O::Element> grad_out,
                  const Gradients<typename O::Element>& grads, void* scratch, int threads) {
  using A = typename O::A;
  const Cut c = cut_of<O>(shape, threads);
  Carver carver(scratch);
  const Shared<O> shared(carver, shape, c);
  char* rest = static_cast<char*>(scratch) + carver.used();
  const std::size_t each = Private<O>::bytes(shape, c);
  const std::int64_t lanes = shape.query_rows * c.group, step = c.panels * kPanel<A>;
#pragma omp parallel num_threads(threads)
  {
    char* piece = rest + static_cast<std::size_t>(omp_get_thread_num()) * each;
    // Products in tiles read behind the keys: what none has filled yet must be numbers.
    if constexpr (O::Products::kSteps > 1) __builtin_memset(piece, 0, each);
    Carver own(piece);
    const Private<O> z(own, shape, c);
    [[maybe_unused]] const typename O::Products::Session session;
#pragma omp for schedule(static)
    for (std::int64_t b = 0; b < shared.blocks.own_count(); ++b) shared.blocks.find_range(b);
    for (std::int64_t begin = 0; begin < lanes; begin += step) {
      Stretch stretch{begin, lesser(begin + step, lanes), 0};
      stretch.panels = ceil_div(stretch.end - begin, kPanel<A>);
#pragma omp single nowait
      balance<O>(shape, c, stretch, shared);
#pragma omp for schedule(dynamic, 1)
      for (std::int64_t n = 0; n < shape.kv_heads * stretch.panels; ++n) {
        const std::int64_t head = n / stretch.panels, index = n % stretch.panels;
        pack<O>(shape, c, in, out, lse_HQ, grad_out, head, panel_at<A>(shape, begin, stretch.end, index),
                shared.panel(shape, c, head, index));
      }
#pragma omp for schedule(dynamic, 1)
      for (std::int64_t unit = 0; unit < shape.kv_heads * c.parts; ++unit)
        run_unit<O>(shape, c, in, grads, stretch, unit / c.parts, unit % c.parts, shared, z);
#pragma omp for schedule(static)
      for (std::int64_t n = 0; n < shape.kv_heads * stretch.panels; ++n)
        finish<O>(shape, c, stretch, n / stretch.panels, n % stretch.panels, shared, grads.q);
    }
  }
}

}  // namespace

template <class T>
void add_backward(attention::cpu::Kernels<T>& kernels);
#define ESPALIER_ADD(T, O)                                     \
  template <>                                                  \
  void add_backward<T>(attention::cpu::Kernels<T> & kernels) { \
    kernels.backward_scratch = backward_scratch<O>;            \
    kernels.add_backward = run_backward<O>;                    \
  }
ESPALIER_EACH_TYPE(ESPALIER_ADD)

}  // namespace espalier::ESPALIER_SIMD
