// Shared-prefix attention on a CPU: fast against plain, for every choice of instructions this CPU has.
//
// One rule for all number types: the error of the fast code against a wider type (long double for float64, float64
// for the others) is at most twice that of the plain code in the same type, plus a floor for cases where the plain
// code is exact by luck: one rounding of each term the result is a sum of, and one of the result as stored. Where
// bfloat16 multiplies as it is, the plain code rounds its weights and slopes to bfloat16 too, and sums in float32.
#include <omp.h>

#include <array>
#include <limits>
#include <map>
#include <sstream>
#include <type_traits>

#include <gtest/gtest.h>

#include "espalier/base/instruction_set.h"
#include "tests/unit/ops/attention/plain_attention.h"
#include "tests/with_products.h"

namespace espalier::attention_test {
namespace {

// A choice of instructions.
struct Level {
  InstructionSet set;
  Bfloat16Products products;

  void force() const {
    force_instruction_set(set);
    force_bfloat16_products(products);
  }
  Factors factors() const {
    return products == Bfloat16Products::converted ? Factors::as_summed : Factors::as_bfloat16;
  }
};
std::ostream& operator<<(std::ostream& to, const Level& l) {
  return to << name_of(l.set) << ", " << name_of(l.products);
}
// All that this CPU has and that make a difference for T.
template <class T>
std::vector<Level> levels() {
  std::vector<Level> all;
  for (const InstructionSet set : kInstructionSets)
    for (const Bfloat16Products products : kBfloat16Products) {
      const bool matters = std::is_same_v<T, bfloat16> && set == InstructionSet::avx512;
      if (!processor_has(set) || !processor_has(products)) continue;
      if (matters || products == Bfloat16Products::converted) all.push_back({set, products});
    }
  return all;
}
// Small problems are what shows a mistake: threads share all of them here.
const bool kThreadsShareAll = (attention::set_least_shared_work(0), true);

// Restores the choice of instructions and threads.
struct Restore {
  int threads = omp_get_max_threads();
  InstructionSet set = instruction_set();
  Bfloat16Products products = bfloat16_products();
  ~Restore() {
    force_instruction_set(set);
    force_bfloat16_products(products);
    omp_set_num_threads(threads);
    attention::set_least_shared_work(0);
  }
};

constexpr double kHeld = 0.375;  // in the K/V accumulators beforehand; exact in every type

// forward, then backward from the given out and lse (the plain code's in the type under test).
template <class T>
Results<double> run(const Problem& p, const std::vector<double>& given_out, const std::vector<double>& given_lse) {
  using A = accumulator_t<T>;
  const int D = p.size.head_dim, wide = p.size.heads * D, narrow = p.size.kv_heads * D, gap = 5;
  const int Dv = p.size.values(), wide_out = p.size.heads * Dv, narrow_v = p.size.kv_heads * Dv;
  const Operand<T> q(p.q, wide, gap), own_k(p.own_k, narrow, gap), own_v(p.own_v, narrow_v, 0),
      path_k(p.path_k, narrow, 2 * gap), path_v(p.path_v, narrow_v, gap), grad_out(p.grad_out, wide_out, gap);
  const attention::Inputs<T> in{q.const_rows(), own_k.const_rows(), own_v.const_rows(), path_k.const_rows(),
                                path_v.const_rows()};
  attention::Shape shape{p.queries(), p.size.own, p.size.path, p.size.heads,        p.size.kv_heads,
                         D,           p.scale,    nullptr,     p.subtree_end.data()};
  if (p.pass_query_row) shape.query_row = p.query_row.data();
  shape.window = p.window;
  if (p.window > 0) shape.depth = p.depth.data();
  shape.value_dim = p.size.value_dim;
  Operand<T> out(std::vector<double>(p.grad_out.size(), -7), wide_out, gap),
      grad_q(std::vector<double>(p.q.size(), -7), wide, gap);
  Operand<A> lse(std::vector<double>(given_lse.size(), -7), p.queries(), 0);
  const auto held = [&](const std::vector<double>& like, int width) {
    return Operand<A>(std::vector<double>(like.size(), kHeld), width, gap);
  };
  Operand<A> grad_own_k = held(p.own_k, narrow), grad_own_v = held(p.own_v, narrow_v),
             grad_path_k = held(p.path_k, narrow), grad_path_v = held(p.path_v, narrow_v);
  const Operand<T> out_in(given_out, wide_out, gap);
  const Operand<A> lse_in(given_lse, p.queries(), 0);
  const attention::Gradients<T> grads{grad_q.rows(), grad_own_k.rows(), grad_own_v.rows(), grad_path_k.rows(),
                                      grad_path_v.rows()};
  attention::forward<T>(shape, in, out.rows(), lse.rows().data);
  attention::add_backward<T>(shape, in, out_in.const_rows(), lse_in.const_rows().data, grad_out.const_rows(), grads);
  Results<double> r;
  const auto take = [&](std::vector<double>& to, auto& from, std::size_t n, const char* what) {
    to = from.values(n);
    EXPECT_TRUE(from.guards_untouched(n)) << what << " wrote outside its rows, " << p;
  };
  take(r.out, out, p.grad_out.size(), "out");
  take(r.lse, lse, given_lse.size(), "lse");
  take(r.q, grad_q, p.q.size(), "grad q");
  take(r.own_k, grad_own_k, p.own_k.size(), "grad own k");
  take(r.own_v, grad_own_v, p.own_v.size(), "grad own v");
  take(r.path_k, grad_path_k, p.path_k.size(), "grad path k");
  take(r.path_v, grad_path_v, p.path_v.size(), "grad path v");
  return r;
}

template <class N>
void hold(const Problem& p, Results<N>& r) {
  r.own_k.assign(p.own_k.size(), N(kHeld)), r.own_v.assign(p.own_v.size(), N(kHeld));
  r.path_k.assign(p.path_k.size(), N(kHeld)), r.path_v.assign(p.path_v.size(), N(kHeld));
}

// The problem's results (wide), and the results of plain code in the type under test (narrow).
template <class T>
struct Expected {
  using A = accumulator_t<T>;
  using Wide = std::conditional_t<std::is_same_v<T, double>, long double, double>;
  Results<Wide> wide, magnitude;
  Results<A> narrow;
  std::vector<double> given_out, given_lse;
  double factor_unit = 0;  // of one rounding of each factor, in a problem too small for such roundings to average

  explicit Expected(const Problem& p, Factors factors = Factors::as_summed) {
    Plain<Wide> exact(p);
    Plain<A> plain(p, factors);
    exact.forward(wide);
    plain.forward(narrow);
    // Backward's inputs: the plain results as they would be stored.
    for (A& x : narrow.out) x = static_cast<A>(rounded<T>(x)), given_out.push_back(x);
    for (const A x : narrow.lse) given_lse.push_back(x);
    Results<Wide> from;
    from.out.assign(given_out.begin(), given_out.end());
    from.lse.assign(given_lse.begin(), given_lse.end());
    hold(p, from), hold(p, narrow);
    magnitude = exact.magnitudes(from);
    exact.backward(from);
    plain.backward(narrow);
    for (A& x : narrow.q) x = static_cast<A>(rounded<T>(x));
    from.out = wide.out, from.lse = wide.lse;
    wide = from;
    if (factors == Factors::as_bfloat16 && p.pairs() < 256) factor_unit = 1.0 / 512;
  }
};

template <class V, class W>
double distance(const V& x, const W& y) {
  long double sum = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const long double d = static_cast<long double>(x[i]) - static_cast<long double>(y[i]);
    sum += d * d;
  }
  return static_cast<double>(std::sqrt(sum));
}

template <class T>
void expect_close(const Problem& p, const Expected<T>& want, const Results<double>& got, const std::string& label) {
  const double unit = std::numeric_limits<accumulator_t<T>>::epsilon() / 2;
  const double stored = std::is_same_v<T, bfloat16> ? 1.0 / 512 : unit;  // rounding of out and grad q
  const auto compare = [&](const char* what, auto part, double rounding, bool of_factors = true) {
    const auto &g = got.*(part(got)), &w = want.wide.*(part(want.wide)), &n = want.narrow.*(part(want.narrow));
    const auto& m = want.magnitude.*(part(want.magnitude));
    const double error = distance(g, w), size = distance(w, std::vector<double>(w.size()));
    const double term = of_factors ? std::max(unit, want.factor_unit) : unit;
    const double floor = term * distance(m, std::vector<double>(m.size())) + rounding * size;
    EXPECT_LE(error, 2 * distance(n, w) + floor) << label << ", " << what << ": plain error " << distance(n, w)
                                                 << ", floor " << floor << ", size " << size << ", " << p;
  };
  compare(
      "out", []<class R>(const R&) { return &R::out; }, stored);
  compare(
      "lse", []<class R>(const R&) { return &R::lse; }, unit, false);
  compare(
      "grad q", []<class R>(const R&) { return &R::q; }, stored);
  compare(
      "grad own k", []<class R>(const R&) { return &R::own_k; }, unit);
  compare(
      "grad own v", []<class R>(const R&) { return &R::own_v; }, unit);
  compare(
      "grad path k", []<class R>(const R&) { return &R::path_k; }, unit);
  compare(
      "grad path v", []<class R>(const R&) { return &R::path_v; }, unit);
}

template <class T>
void expect_fast_is_right(const Problem& p) {
  const Restore restore;
  std::map<Factors, Expected<T>> want;
  for (const Level& level : levels<T>()) {
    const Expected<T>& here = want.try_emplace(level.factors(), p, level.factors()).first->second;
    level.force();
    omp_set_num_threads(1 + static_cast<int>(p.seed % 5));
    expect_close(p, here, run<T>(p, here.given_out, here.given_lse), (std::stringstream() << level).str());
  }
}

template <class T>
class AttentionOf : public testing::Test {};
using Numbers = testing::Types<double, float, bfloat16>;
TYPED_TEST_SUITE(AttentionOf, Numbers);

TYPED_TEST(AttentionOf, IsRightOnRandomTrees) {
  std::mt19937_64 random(2026);
  const auto pick = [&](std::initializer_list<int> from) { return from.begin()[random() % from.size()]; };
  for (int n = 0; n < 60; ++n) {
    Sizes s;
    s.head_dim = pick({8, 40, 64, 80, 96, 128, 256});
    s.kv_heads = pick({1, 2, 3});
    s.heads = s.kv_heads * pick({1, 2, 4, 8});
    // Few enough pairs for the plain code, with sizes on both sides of the block edges (48 to 120 keys, 2 to 64 lanes).
    const int most = std::clamp(static_cast<int>(std::sqrt(300000.0 / (s.head_dim * s.heads))), 9, 260);
    s.own = 1 + static_cast<int>(random() % static_cast<unsigned>(most));
    s.path = random() % 4 == 0 ? 0 : static_cast<int>(random() % static_cast<unsigned>(most));
    const Rows rows = random() % 2 ? Rows::all : Rows::some_repeated;
    expect_fast_is_right<TypeParam>(random_problem<TypeParam>(1000 + n, s, rows));
  }
}

// Query rows [first, keys) of a chain of `keys` rows, of which the first `path` are the path: out, then lse, of rows
// from `from` on.
template <class T>
std::vector<double> rows_of_chain(int keys, int path, int first, int from, int threads) {
  using A = accumulator_t<T>;
  constexpr int H = 4, J = 2, D = 40;
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<T> q(static_cast<std::size_t>(keys * H * D)), k(static_cast<std::size_t>(keys * J * D)), v(k.size()), out;
  for (std::vector<T>* numbers : {&q, &k, &v})
    for (T& x : *numbers) x = static_cast<T>(3 * normal(random));
  const int own = keys - path, queries = keys - first;
  std::vector<std::int32_t> ends(static_cast<std::size_t>(own), own), at(static_cast<std::size_t>(queries));
  for (int i = 0; i < queries; ++i) at[static_cast<std::size_t>(i)] = first + i - path;
  out.resize(static_cast<std::size_t>(queries * H * D));
  std::vector<A> lse(static_cast<std::size_t>(queries * H));
  const attention::Shape shape{queries, own, path, H, J, D, 0.3, at.data(), ends.data()};
  omp_set_num_threads(threads);
  attention::forward<T>(shape,
                        {{q.data() + first * H * D, H * D},
                         {k.data() + path * J * D, J * D},
                         {v.data() + path * J * D, J * D},
                         {k.data(), J * D},
                         {v.data(), J * D}},
                        {out.data(), H * D}, lse.data());
  std::vector<double> found;
  for (std::size_t i = static_cast<std::size_t>((from - first) * H * D); i < out.size(); ++i)
    found.push_back(static_cast<double>(out[i]));
  for (int head = 0; head < H; ++head)
    for (int i = from - first; i < queries; ++i)
      found.push_back(static_cast<double>(lse[static_cast<std::size_t>(head * queries + i)]));
  return found;
}

// Where sums have a defined order: 1,200 keys are enough for threads to divide them otherwise.
TYPED_TEST(AttentionOf, OfDefinedSumsHasTheSameBitsHoweverKeysAndQueriesAreSharded) {
  const Restore restore;
  const WithProducts own(true);
  for (const Level& level : levels<TypeParam>()) {
    level.force();
    for (const int keys : {65, 300, 1200}) {
      const int last = keys - 3;  // the rows that are compared
      const std::vector<double> expected = rows_of_chain<TypeParam>(keys, 0, 0, last, 1);
      for (const int path : {1, 47, keys / 2, keys - 9})
        for (const int first : {path, keys - 5, last})
          for (const int threads : {1, 2, 5})
            EXPECT_EQ(rows_of_chain<TypeParam>(keys, path, first, last, threads), expected)
                << level << ", " << keys << " keys, " << path << " of them the path's, queries from " << first << ", "
                << threads << " threads";
    }
  }
}

TYPED_TEST(AttentionOf, IsRightAtBlockEdges) {
  for (const int edge : {1, 15, 16, 17, 63, 64, 65, 119, 120, 121, 240}) {
    expect_fast_is_right<TypeParam>(random_problem<TypeParam>(edge, {edge, 3, 2, 1, 16}, Rows::all, 1, true));
    expect_fast_is_right<TypeParam>(random_problem<TypeParam>(edge + 1, {5, edge, 4, 1, 24}, Rows::all));
    expect_fast_is_right<TypeParam>(random_problem<TypeParam>(edge + 2, {edge, edge, 1, 1, 7}, Rows::all));
  }
}

TYPED_TEST(AttentionOf, IsRightForLargeScores) {
  // Scores of normal keys and a query scaled by m have a spread of about m: lse near +-1000.
  for (const double magnitude : {30.0, 300.0}) {
    expect_fast_is_right<TypeParam>(random_problem<TypeParam>(7, {70, 130, 4, 2, 64}, Rows::all, magnitude));
    Problem low = random_problem<TypeParam>(8, {70, 130, 4, 2, 64}, Rows::all, magnitude);
    for (std::vector<double>* x : {&low.q, &low.own_k, &low.path_k})  // every product negative
      for (double& v : *x) v = x == &low.q ? -std::fabs(v) : std::fabs(v);
    expect_fast_is_right<TypeParam>(low);
  }
}

TYPED_TEST(AttentionOf, IsRightForOneQueryPerSlot) {
  expect_fast_is_right<TypeParam>(slots_problem<TypeParam>(31, {40 * 9, 30, 4, 2, 16}, 9, 100));
  expect_fast_is_right<TypeParam>(slots_problem<TypeParam>(32, {12 * 70, 0, 8, 1, 40}, 70, 3));
  expect_fast_is_right<TypeParam>(slots_problem<TypeParam>(33, {3 * 300, 140, 3, 3, 64}, 300, 100));
  expect_fast_is_right<TypeParam>(slots_problem<TypeParam>(34, {5 * 130, 10, 2, 1, 128}, 130, 2));
}

// Rows of a slot without a query stand in blocks that nobody sees: numbers that are none must not matter there. Slots
// of 400 keys hold such blocks whole, blocks being of 48 to 128 keys.
TYPED_TEST(AttentionOf, BlocksThatNobodySeesAreNotRead) {
  const Restore restore;
  Problem p = slots_problem<TypeParam>(35, {3 * 400, 20, 2, 1, 16}, 400, 100);
  p.query_row = {350, 1100};
  p.q.resize(2 * 2 * 16), p.grad_out.resize(2 * 2 * 16);
  for (std::vector<double>* x : {&p.own_k, &p.own_v})
    for (std::size_t i = 528 * 16; i < 672 * 16; ++i) (*x)[i] = std::numeric_limits<double>::quiet_NaN();
  for (const Level& level : levels<TypeParam>())
    for (const int threads : {1, 3}) {
      level.force();
      omp_set_num_threads(threads);
      const Results<double> r = run<TypeParam>(p, std::vector<double>(p.q.size(), 0.25), {5, 5, 5, 5});
      for (const auto* x : {&r.out, &r.lse, &r.q, &r.own_k, &r.own_v, &r.path_k, &r.path_v})
        EXPECT_TRUE(std::all_of(x->begin(), x->end(), [](double v) { return std::isfinite(v); })) << level;
    }
}

// Latent attention: heads of values are smaller or larger than heads of keys.
TYPED_TEST(AttentionOf, IsRightForValuesOfAnotherSize) {
  std::mt19937_64 random(2028);
  const auto pick = [&](std::initializer_list<int> from) { return from.begin()[random() % from.size()]; };
  for (int n = 0; n < 40; ++n) {
    Sizes s;
    s.head_dim = pick({7, 12, 24, 48, 96, 192});
    s.value_dim = pick({5, 8, 16, 33, 128, 256});
    s.kv_heads = pick({1, 2, 3});
    s.heads = s.kv_heads * pick({1, 1, 4});
    const int most = std::clamp(static_cast<int>(std::sqrt(300000.0 / (s.head_dim * s.heads))), 9, 260);
    s.own = 1 + static_cast<int>(random() % static_cast<unsigned>(most));
    s.path = random() % 4 == 0 ? 0 : static_cast<int>(random() % static_cast<unsigned>(most));
    const Problem p = random_problem<TypeParam>(5000 + n, s, random() % 2 ? Rows::all : Rows::some_repeated);
    expect_fast_is_right<TypeParam>(n % 3 == 0 ? with_window(p, 1 + s.own / 2) : p);
  }
  for (const std::uint64_t seed : {40, 42, 44})  // the keys are cut among threads
    expect_fast_is_right<TypeParam>(random_problem<TypeParam>(seed, {2, 2100, 2, 2, 24, 16}, Rows::all));
}

// A window counts depths, not rows: in a tree the rows of a branch stand behind its siblings' rows.
TYPED_TEST(AttentionOf, IsRightWithAWindow) {
  std::mt19937_64 random(2027);
  const auto pick = [&](std::initializer_list<int> from) { return from.begin()[random() % from.size()]; };
  for (int n = 0; n < 40; ++n) {
    Sizes s;
    s.head_dim = pick({8, 40, 64, 96, 128});
    s.kv_heads = pick({1, 2});
    s.heads = s.kv_heads * pick({1, 2, 8});
    const int most = std::clamp(static_cast<int>(std::sqrt(300000.0 / (s.head_dim * s.heads))), 9, 260);
    s.own = 1 + static_cast<int>(random() % static_cast<unsigned>(most));
    s.path = random() % 4 == 0 ? 0 : static_cast<int>(random() % static_cast<unsigned>(most));
    const Problem p = random_problem<TypeParam>(3000 + n, s, random() % 2 ? Rows::all : Rows::some_repeated);
    const int all = s.path + s.own;
    expect_fast_is_right<TypeParam>(with_window(p, 1 + static_cast<int>(random() % static_cast<unsigned>(all))));
    expect_fast_is_right<TypeParam>(with_window(p, pick({1, 2, 3, 17})));
  }
  for (const int edge : {16, 63, 64, 65, 120, 121})
    for (const int window : {1, edge - 1, edge, edge + 1})
      expect_fast_is_right<TypeParam>(
          with_window(random_problem<TypeParam>(edge, {edge + 7, edge, 2, 1, 16}, Rows::all, 1, true), window));
  expect_fast_is_right<TypeParam>(with_window(slots_problem<TypeParam>(36, {40 * 9, 30, 4, 2, 16}, 9, 100), 12));
  for (const std::uint64_t seed : {40, 42, 44})  // the keys are cut among threads
    expect_fast_is_right<TypeParam>(with_window(random_problem<TypeParam>(seed, {2, 2100, 2, 1, 16}, Rows::all), 1300));
}

// A window that reaches the first row hides nothing: the bits are those without one.
TYPED_TEST(AttentionOf, AWindowThatHidesNothingChangesNoBit) {
  const Restore restore;
  const Problem p = random_problem<TypeParam>(14, {150, 140, 4, 2, 64}, Rows::some_repeated);
  const std::vector<double> out(p.q.size(), 0.25), lse(static_cast<std::size_t>(p.queries()) * 4, 5.0);
  for (const Level& level : levels<TypeParam>()) {
    level.force();
    const Results<double> all = run<TypeParam>(p, out, lse), seen = run<TypeParam>(with_window(p, 290), out, lse);
    EXPECT_EQ(all.out, seen.out);
    EXPECT_EQ(all.q, seen.q);
    EXPECT_EQ(all.own_k, seen.own_k);
    EXPECT_EQ(all.path_v, seen.path_v);
  }
}

// Few queries over many keys: the keys are cut among the threads (from 1024 keys on) and merged.
TYPED_TEST(AttentionOf, IsRightForFewQueriesOverALongPath) {
  for (const std::uint64_t seed : {40, 41, 42, 43, 44, 45, 46}) {  // 1 to 5 threads
    const int own = 1 + static_cast<int>(seed % 3);
    expect_fast_is_right<TypeParam>(random_problem<TypeParam>(seed, {own, 2100, 2, 1, 16}, Rows::all));
  }
  expect_fast_is_right<TypeParam>(slots_problem<TypeParam>(48, {2 * 700, 900, 2, 1, 24}, 700, 100));
}

TYPED_TEST(AttentionOf, CopesWithNothing) {
  for (const Sizes s : {Sizes{1, 0, 1, 1, 8}, Sizes{1, 1, 8, 1, 64}, Sizes{3, 0, 2, 2, 1}})
    expect_fast_is_right<TypeParam>(random_problem<TypeParam>(3, s, Rows::all));
  // No query rows: nothing is read or written, whatever else is there.
  for (const Sizes s : {Sizes{0, 0, 2, 1, 8}, Sizes{0, 9, 2, 1, 8}, Sizes{4, 9, 2, 1, 8}}) {
    Problem p = random_problem<TypeParam>(4, s, Rows::some_repeated);
    p.query_row.clear(), p.q.clear(), p.grad_out.clear();
    const Results<double> r = run<TypeParam>(p, {}, {});
    for (const auto* x : {&r.own_k, &r.own_v, &r.path_k, &r.path_v})
      for (const double v : *x) EXPECT_EQ(v, kHeld);
  }
}

TYPED_TEST(AttentionOf, GivesTheSameBitsTwice) {
  const Restore restore;
  const Problem both[] = {random_problem<TypeParam>(11, {150, 140, 4, 2, 64}, Rows::some_repeated),
                          random_problem<TypeParam>(12, {2, 3000, 4, 1, 32}, Rows::all)};  // keys cut among threads
  for (const Problem& p : both)
    for (const Level& level : levels<TypeParam>())
      for (const int threads : {1, 2, 5}) {
        const std::vector<double> out(p.q.size(), 0.25), lse(static_cast<std::size_t>(p.queries()) * 4, 5.0);
        level.force();
        omp_set_num_threads(threads);
        const Results<double> first = run<TypeParam>(p, out, lse);
        const Results<double> again = run<TypeParam>(p, out, lse);
        EXPECT_EQ(first.out, again.out);
        EXPECT_EQ(first.lse, again.lse);
        EXPECT_EQ(first.q, again.q);
        EXPECT_EQ(first.own_k, again.own_k);
        EXPECT_EQ(first.own_v, again.own_v);
        EXPECT_EQ(first.path_k, again.path_k);
        EXPECT_EQ(first.path_v, again.path_v);
      }
}

// Heads that divide the number of threads and that do not; keys of many blocks and of one.
TYPED_TEST(AttentionOf, BackwardHasTheSameBitsOnAnyNumberOfThreads) {
  const Restore restore;
  for (const auto& [own, path, heads, kv_heads] :
       {std::array{150, 900, 4, 2}, {150, 140, 4, 1}, {30, 700, 3, 3}, {9, 0, 2, 2}}) {
    const Problem p = random_problem<TypeParam>(14, {own, path, heads, kv_heads, 24}, Rows::all);
    const std::vector<double> out(p.q.size(), 0.25), lse(static_cast<std::size_t>(p.queries() * heads), 5.0);
    for (const Level& level : levels<TypeParam>()) {
      level.force();
      omp_set_num_threads(1);
      const Results<double> alone = run<TypeParam>(p, out, lse);
      for (const int threads : {2, 3, 16}) {
        SCOPED_TRACE(::testing::Message() << level << ", " << p << ", " << threads << " threads");
        omp_set_num_threads(threads);
        const Results<double> shared = run<TypeParam>(p, out, lse);
        EXPECT_EQ(shared.q, alone.q);
        EXPECT_EQ(shared.own_k, alone.own_k);
        EXPECT_EQ(shared.own_v, alone.own_v);
        EXPECT_EQ(shared.path_k, alone.path_k);
        EXPECT_EQ(shared.path_v, alone.path_v);
      }
    }
  }
}

// Two queries over 1502 keys, which five threads would cut into two parts and add up in another order.
TEST(Attention, SmallProblemsAreTheCallingThreadsAlone) {
  const Restore restore;
  const WithProducts library(false);
  const Problem p = random_problem<double>(13, {2, 1500, 1, 1, 16}, Rows::all);
  const std::vector<double> out(p.q.size(), 0.25), lse(static_cast<std::size_t>(p.queries()), 5.0);
  omp_set_num_threads(1);
  const Results<double> alone = run<double>(p, out, lse);
  omp_set_num_threads(5);
  EXPECT_NE(run<double>(p, out, lse).out, alone.out);
  attention::set_least_shared_work(attention::kLeastSharedWork);
  EXPECT_EQ(run<double>(p, out, lse).out, alone.out);
}

// d/dx of L = sum w o out, by central differences: truncation h^2/6 L''' and rounding 1e-16 L / h are both near 1e-11
// at h = 1e-5 for numbers of order one, so 1e-8 holds only if the derivative is the right one.
TEST(Attention, TheBackwardIsTheDerivative) {
  for (const std::uint64_t seed : {1, 2, 3}) {
    const Problem p = random_problem<double>(seed, {9, 4, 4, 2, 8}, seed == 2 ? Rows::some_repeated : Rows::all);
    const auto loss = [](const Problem& at) {
      const Results<double> r = run<double>(at, std::vector<double>(at.q.size()),
                                            std::vector<double>(static_cast<std::size_t>(at.queries()) * 4));
      double sum = 0;
      for (std::size_t i = 0; i < r.out.size(); ++i) sum += at.grad_out[i] * r.out[i];
      return sum;
    };
    const Results<double> at_p =
        run<double>(p, std::vector<double>(p.q.size()), std::vector<double>(static_cast<std::size_t>(p.queries()) * 4));
    const Results<double> r = run<double>(p, at_p.out, at_p.lse);
    const auto check = [&](std::vector<double> Problem::*x, const std::vector<double>& grad, double held) {
      for (std::size_t i = 0; i < grad.size(); ++i) {
        Problem up = p, down = p;
        (up.*x)[i] += 1e-5, (down.*x)[i] -= 1e-5;
        EXPECT_NEAR(grad[i] - held, (loss(up) - loss(down)) / 2e-5, 1e-8) << p << ", element " << i;
      }
    };
    check(&Problem::q, r.q, 0);
    check(&Problem::own_k, r.own_k, kHeld);
    check(&Problem::own_v, r.own_v, kHeld);
    check(&Problem::path_k, r.path_k, kHeld);
    check(&Problem::path_v, r.path_v, kHeld);
  }
}

// A mask that leaks one key is far above every limit used here: the fast code must see the difference.
TEST(Attention, OneKeyMoreIsNoticed) {
  const Problem p = random_problem<double>(21, {130, 10, 2, 1, 16}, Rows::all);
  const Expected<double> want(p);
  Problem wrong = p;
  const auto last = std::find_if(wrong.subtree_end.begin(), wrong.subtree_end.end(), [](int e) { return e < 130; });
  ASSERT_NE(last, wrong.subtree_end.end());
  ++*last;
  const Results<double> got = run<double>(wrong, want.given_out, want.given_lse);
  EXPECT_GT(distance(got.out, want.wide.out), 1e-6);
  const Problem narrow = with_window(p, 6);
  const Expected<double> in_window(narrow);
  const Results<double> wider = run<double>(with_window(p, 7), in_window.given_out, in_window.given_lse);
  EXPECT_GT(distance(wider.out, in_window.wide.out), 1e-6);
}

}  // namespace
}  // namespace espalier::attention_test
