// Backward of shared-prefix attention on a CPU; compiled once per instruction set.
//
//   per panel and key block: S = K Q^T, P = e^(scale S - lse), dP = V dO^T, dS = P o (dP - D), D_i = dO_i . out_i
//   gV += P^T dO, gK += scale dS^T Q, dQ^T += K^T dS                                        (mathematics, section 1)
//
// Query rows are taken in stretches whose packed panels fit kSharedBytes. For each stretch: all threads pack
// panels; then units (key/value head x part of the keys) run, each with its own dQ; then the parts' dQ are added in
// order and written. A head's keys are cut into as few parts as give every thread the same number of units, equal in
// visible pairs. Every key belongs to one unit of a stretch: no atomics, and an order of additions that depends on the
// thread count only.
#include <omp.h>

#include "espalier/attention/cpu/kernels.h"
#include "espalier/attention/cpu/panel.h"

namespace espalier::ESPALIER_SIMD {
namespace {

inline constexpr std::int64_t kSharedBytes = std::int64_t{32} << 20;

// How the work is cut.
struct Cut {
  std::int64_t group = 0, padded = 0;  // heads per key/value head; head size in whole vectors
  std::int64_t parts = 0;              // parts of the keys of one head
  std::int64_t panels = 0;             // panels of one head in a stretch
  std::int64_t block = 0, blocks = 0;  // keys of a block, blocks of all keys
};
template <class A>
Cut cut_of(const Shape& shape, int threads) {
  Cut c;
  c.group = shape.heads / shape.kv_heads;
  c.padded = whole_vectors<A>(shape.head_dim);
  c.block = key_block<A>(shape.head_dim);
  c.blocks = block_count(shape, c.block);
  std::int64_t a = threads, b = shape.kv_heads;
  while (b != 0) {
    const std::int64_t rest = a % b;
    a = b;
    b = rest;
  }
  c.parts = greater(1, lesser(threads / a, c.blocks));
  const std::int64_t panel = kPanel<A> * c.padded * (4 + c.parts) * static_cast<std::int64_t>(sizeof(A));
  const std::int64_t all = ceil_div(shape.query_rows * c.group, kPanel<A>);
  c.panels = greater(1, lesser(all, kSharedBytes / (panel * shape.kv_heads)));
  return c;
}

// Of one panel, packed once per stretch and read by all units.
template <class A>
struct Packed {
  A *queries_t, *grads_t;  // [D][W]: Q^T (signed as the scale) and dO^T
  A *queries, *grads;      // [W][padded]: Q and dO
  A *lse, *dots;           // [W]: lse and D_i
  IntegerVector<A>* rows;  // own rows of its lanes
};

template <class A>
struct Shared {
  A *queries_t, *grads_t, *queries, *grads, *lse, *dots, *partial;
  IntegerVector<A>* rows;
  std::int64_t* bounds;  // [parts + 1] blocks

  Shared(Carver& carver, const Shape& shape, const Cut& c) {
    const std::int64_t n = shape.kv_heads * c.panels, wide = n * kPanel<A>;
    queries_t = carver.take<A>(wide * shape.head_dim);
    grads_t = carver.take<A>(wide * shape.head_dim);
    queries = carver.take<A>(wide * c.padded);
    grads = carver.take<A>(wide * c.padded);
    lse = carver.take<A>(wide);
    dots = carver.take<A>(wide);
    partial = carver.take<A>(wide * shape.head_dim * c.parts);
    rows = carver.take<IntegerVector<A>>(n * kTileVectors);
    bounds = carver.take<std::int64_t>(c.parts + 1);
  }
  // Panel `index` of head `head`.
  Packed<A> panel(const Shape& shape, const Cut& c, std::int64_t head, std::int64_t index) const {
    const std::int64_t n = head * c.panels + index, wide = n * kPanel<A>;
    return {queries_t + wide * shape.head_dim,
            grads_t + wide * shape.head_dim,
            queries + wide * c.padded,
            grads + wide * c.padded,
            lse + wide,
            dots + wide,
            rows + n * kTileVectors};
  }
  A* partial_of(const Shape& shape, const Cut& c, std::int64_t head, std::int64_t part, std::int64_t index) const {
    return partial + ((head * c.parts + part) * c.panels + index) * shape.head_dim * kPanel<A>;
  }
};

template <class A>
struct Private {
  A *keys, *values, *grad_keys, *grad_values, *scores, *slopes;

  Private(Carver& carver, const Shape& shape, const Cut& c) {
    keys = carver.take<A>(c.block * shape.head_dim);
    values = carver.take<A>(c.block * shape.head_dim);
    grad_keys = carver.take<A>(c.block * c.padded);
    grad_values = carver.take<A>(c.block * c.padded);
    scores = carver.take<A>(c.block * kPanel<A>);
    slopes = carver.take<A>(c.block * kPanel<A>);
  }
};

template <class T>
void pack(const Shape& shape, const Cut& c, const Inputs<T>& in, Rows<const T> out, const accumulator_t<T>* lse_HQ,
          Rows<const T> grad_out, std::int64_t head, const PanelPlace<accumulator_t<T>>& p,
          const Packed<accumulator_t<T>>& to) {
  using A = accumulator_t<T>;
  pack_panel<T>(shape, in.q, head, p, sign<A>(shape.scale), to.queries_t);
  pack_panel<T>(shape, grad_out, head, p, A(1), to.grads_t);
  lane_rows(shape, p, reinterpret_cast<decltype(IntegerVector<A>{}[0] + 0)*>(to.rows));
  for (int lane = 0; lane < p.count; ++lane) {
    const std::int64_t at = p.first + lane;
    copy_row(lane_row(shape, in.q, head, at), shape.head_dim, to.queries + lane * c.padded, c.padded);
    copy_row(lane_row(shape, grad_out, head, at), shape.head_dim, to.grads + lane * c.padded, c.padded);
    Vector<A> dot{};
    for_lanes<T>(shape.head_dim, [&](std::int64_t d, int count) {
      dot += load(to.grads + lane * c.padded + d) * load_some(lane_row(shape, out, head, at) + d, count);
    });
    to.dots[lane] = sum(dot);
    to.lse[lane] = lse_HQ[(head * c.group + at % c.group) * shape.query_rows + at / c.group];
  }
  for (int lane = p.count; lane < kPanel<A>; ++lane) to.dots[lane] = to.lse[lane] = 0;
}

// S and dP become P and dS: P = e^(scale S - lse), 0 where unseen; dS = P (dP - D).
template <int vectors, bool masked, class A>
__attribute__((noinline)) void softmax_slopes(const KeyBlock& block, const Visible& seen, const Packed<A>& panel,
                                              A scale, A* s, A* slopes) {
  Vector<A> lse[vectors], dots[vectors];
#pragma GCC unroll 8
  for (int v = 0; v < vectors; ++v) {
    lse[v] = load(panel.lse + v * kLanes<A>);
    dots[v] = load(panel.dots + v * kLanes<A>);
  }
  for (std::int64_t j = seen.first; j < seen.end; ++j) {
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) {
      const std::int64_t at = (j - seen.first) * kPanel<A> + v * kLanes<A>;
      Vector<A> p = exp_nonpositive(load(s + at) * scale - lse[v]);
      if constexpr (masked) p = sees(panel.rows[v], block.begin + j, block.ends[j]) ? p : Vector<A>{};
      store(s + at, p);
      store(slopes + at, p * (load(slopes + at) - dots[v]));
    }
  }
}

template <class A>
void panel_step(const Shape& shape, const Cut& c, const PanelPlace<A>& p, const Packed<A>& panel, const KeyBlock& block,
                const Visible& seen, const Private<A>& z, A* grad_queries_t) {
  const std::int64_t D = shape.head_dim, n = seen.end - seen.first;
  const A *keys = z.keys + seen.first * D, *values = z.values + seen.first * D;
  with_vectors(p.vectors, [&](auto count) {
    constexpr int vectors = decltype(count)::value;
    scores<vectors, false>(n, D, keys, panel.queries_t, z.scores, static_cast<A*>(nullptr));
    scores<vectors, false>(n, D, values, panel.grads_t, z.slopes, static_cast<A*>(nullptr));
    const A scale = magnitude<A>(shape.scale);
    if (seen.masked)
      softmax_slopes<vectors, true>(block, seen, panel, scale, z.scores, z.slopes);
    else
      softmax_slopes<vectors, false>(block, seen, panel, scale, z.scores, z.slopes);
    weighted<vectors, false>(n, D, keys, z.slopes, grad_queries_t, static_cast<const A*>(nullptr));
  });
  outer(n, p.count, z.scores, panel.grads, z.grad_values + seen.first * c.padded, c.padded);
  outer(n, p.count, z.slopes, panel.queries, z.grad_keys + seen.first * c.padded, c.padded);
}

// to += factor * from, row by row.
template <class A>
void add_rows(std::int64_t n, std::int64_t head_dim, const A* from, std::int64_t stride, A factor, A* to,
              std::int64_t to_stride) {
  for (std::int64_t j = 0; j < n; ++j)
    for_lanes<A>(head_dim, [&](std::int64_t d, int count) {
      A* at = to + j * to_stride + d;
      store_some(at, load_some(at, count) + load(from + j * stride + d) * factor, count);
    });
}

// Lanes [begin, end) of every head.
struct Stretch {
  std::int64_t begin = 0, end = 0, panels = 0;
};

// One unit: blocks [from, to) of head `head` against all panels of the stretch.
template <class T>
void run_unit(const Shape& shape, const Cut& c, const Inputs<T>& in, const Gradients<T>& grads, const Stretch& stretch,
              std::int64_t head, std::int64_t part, const Shared<accumulator_t<T>>& shared,
              const Private<accumulator_t<T>>& z) {
  using A = accumulator_t<T>;
  const std::int64_t D = shape.head_dim;
  __builtin_memset(shared.partial_of(shape, c, head, part, 0), 0,
                   sizeof(A) * static_cast<std::size_t>(stretch.panels * D * kPanel<A>));
  for (std::int64_t b = shared.bounds[part]; b < shared.bounds[part + 1]; ++b) {
    const KeyBlock block = block_at(shape, b, c.block);
    const Rows<const T> keys = block.ends ? in.own_k : in.path_k, values = block.ends ? in.own_v : in.path_v;
    const Rows<A> grad_k = block.ends ? grads.own_k : grads.path_k, grad_v = block.ends ? grads.own_v : grads.path_v;
    bool packed = false;
    for (std::int64_t i = 0; i < stretch.panels; ++i) {
      const PanelPlace<A> p = panel_at<A>(shape, stretch.begin + i * kPanel<A>, stretch.end);
      const Visible seen = visible(block, p.row_min, p.row_max);
      if (seen.first >= seen.end) continue;
      if (!packed) {
        for (std::int64_t j = 0; j < block.count; ++j) {
          copy_row(keys.data + (block.begin + j) * keys.stride + head * D, D, z.keys + j * D, D);
          copy_row(values.data + (block.begin + j) * values.stride + head * D, D, z.values + j * D, D);
        }
        __builtin_memset(z.grad_keys, 0, sizeof(A) * static_cast<std::size_t>(block.count * c.padded));
        __builtin_memset(z.grad_values, 0, sizeof(A) * static_cast<std::size_t>(block.count * c.padded));
        packed = true;
      }
      panel_step<A>(shape, c, p, shared.panel(shape, c, head, i), block, seen, z,
                    shared.partial_of(shape, c, head, part, i));
    }
    if (!packed) continue;
    add_rows<A>(block.count, D, z.grad_keys, c.padded, static_cast<A>(shape.scale),
                grad_k.data + block.begin * grad_k.stride + head * D, grad_k.stride);
    add_rows<A>(block.count, D, z.grad_values, c.padded, A(1), grad_v.data + block.begin * grad_v.stride + head * D,
                grad_v.stride);
  }
}

// Cuts the blocks into parts of about equal numbers of visible pairs.
template <class A>
void balance(const Shape& shape, const Cut& c, const Stretch& stretch, const Shared<A>& shared) {
  const auto pairs = [&](std::int64_t b) {
    const KeyBlock block = block_at(shape, b, c.block);
    std::int64_t total = 0;
    for (std::int64_t i = 0; i < stretch.panels; ++i) {
      const PanelPlace<A> p = panel_at<A>(shape, stretch.begin + i * kPanel<A>, stretch.end);
      const Visible seen = visible(block, p.row_min, p.row_max);
      total += greater(0, seen.end - seen.first);
    }
    return total;
  };
  std::int64_t all = 0, done = 0, part = 0;
  if (c.parts > 1)
    for (std::int64_t b = 0; b < c.blocks; ++b) all += pairs(b);
  shared.bounds[0] = 0;
  for (std::int64_t b = 0; b < c.blocks && c.parts > 1; ++b) {
    const std::int64_t here = pairs(b);
    // A bound stands before the block whose middle passes the part's share.
    while (part + 1 < c.parts && (2 * done + here) * c.parts >= 2 * (part + 1) * all && b > 0)
      shared.bounds[++part] = b;
    done += here;
  }
  while (part < c.parts) shared.bounds[++part] = c.blocks;
}

template <class T>
void finish(const Shape& shape, const Cut& c, const Stretch& stretch, std::int64_t head, std::int64_t index,
            const Shared<accumulator_t<T>>& shared, Rows<T> grad_q) {
  using A = accumulator_t<T>;
  constexpr int W = kPanel<A>;
  A* total = shared.partial_of(shape, c, head, 0, index);
  for (std::int64_t part = 1; part < c.parts; ++part)
    add_rows<A>(shape.head_dim, W, shared.partial_of(shape, c, head, part, index), W, A(1), total, W);
  alignas(64) A factor[W];
  for (int lane = 0; lane < W; ++lane) factor[lane] = static_cast<A>(shape.scale);
  const PanelPlace<A> p = panel_at<A>(shape, stretch.begin + index * W, stretch.end);
  unpack_panel<T>(shape, total, factor, head, p, grad_q);
}

template <class A>
std::size_t private_bytes(const Shape& shape, const Cut& c) {
  Carver carver(nullptr);
  Private<A>(carver, shape, c);
  return carver.used();
}
template <class T>
std::size_t backward_scratch(const Shape& shape, int threads) {
  using A = accumulator_t<T>;
  const Cut c = cut_of<A>(shape, threads);
  Carver carver(nullptr);
  Shared<A>(carver, shape, c);
  return carver.used() + private_bytes<A>(shape, c) * static_cast<std::size_t>(threads);
}

template <class T>
void run_backward(const Shape& shape, const Inputs<T>& in, Rows<const T> out, const accumulator_t<T>* lse_HQ,
                  Rows<const T> grad_out, const Gradients<T>& grads, void* scratch, int threads) {
  using A = accumulator_t<T>;
  const Cut c = cut_of<A>(shape, threads);
  Carver carver(scratch);
  const Shared<A> shared(carver, shape, c);
  char* rest = static_cast<char*>(scratch) + carver.used();
  const std::size_t each = private_bytes<A>(shape, c);
  const std::int64_t lanes = shape.query_rows * c.group, step = c.panels * kPanel<A>;
#pragma omp parallel num_threads(threads)
  {
    Carver own(rest + static_cast<std::size_t>(omp_get_thread_num()) * each);
    const Private<A> z(own, shape, c);
    for (std::int64_t begin = 0; begin < lanes; begin += step) {
      Stretch stretch{begin, lesser(begin + step, lanes), 0};
      stretch.panels = ceil_div(stretch.end - begin, kPanel<A>);
#pragma omp single nowait
      balance<A>(shape, c, stretch, shared);
#pragma omp for schedule(dynamic, 1)
      for (std::int64_t n = 0; n < shape.kv_heads * stretch.panels; ++n) {
        const std::int64_t head = n / stretch.panels, index = n % stretch.panels;
        pack<T>(shape, c, in, out, lse_HQ, grad_out, head, panel_at<A>(shape, begin + index * kPanel<A>, stretch.end),
                shared.panel(shape, c, head, index));
      }
#pragma omp for schedule(dynamic, 1)
      for (std::int64_t unit = 0; unit < shape.kv_heads * c.parts; ++unit)
        run_unit<T>(shape, c, in, grads, stretch, unit / c.parts, unit % c.parts, shared, z);
#pragma omp for schedule(static)
      for (std::int64_t n = 0; n < shape.kv_heads * stretch.panels; ++n)
        finish<T>(shape, c, stretch, n / stretch.panels, n % stretch.panels, shared, grads.q);
    }
  }
}

}  // namespace

template <class T>
void add_backward(attention::cpu::Kernels<T>& kernels);
template <class T>
void add_backward(attention::cpu::Kernels<T>& kernels) {
  kernels.backward_scratch = backward_scratch<T>;
  kernels.backward = run_backward<T>;
}
template void add_backward<float>(attention::cpu::Kernels<float>&);
template void add_backward<double>(attention::cpu::Kernels<double>&);
template void add_backward<bfloat16>(attention::cpu::Kernels<bfloat16>&);

}  // namespace espalier::ESPALIER_SIMD
