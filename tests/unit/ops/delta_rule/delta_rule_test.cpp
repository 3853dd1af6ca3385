// The recurrence of one head, gated delta rule and Mamba-2: row by row forward, in blocks backward, against plain loops
// over rows.
#include "espalier/ops/cpu/delta_rule_ranges.h"

#include "espalier/base/instruction_set.h"
#include "tests/unit/ops/row_kernels/row_cases.h"

namespace espalier {
namespace {

struct Sizes {
  std::int64_t rows, key_dim, value_dim;
};
// One row, odd numbers of rows and channels, a whole block, heads of published models.
constexpr Sizes kHeads[] = {{1, 1, 1},  {1, 7, 5},    {2, 3, 5},    {5, 16, 16},   {17, 7, 70},
                            {63, 8, 6}, {64, 16, 24}, {33, 20, 50}, {64, 128, 128}};

// Rows, the state before them, what comes to their results and to the state behind them, as numbers N.
template <class N>
struct Rows {
  std::vector<N> q, k, v, log_decay, beta, start, grad_o, grad_end;
};
// Every fifth token forgets up to e^-20 of the state. Keys and queries have norm 1 and dk^-1/2.
template <class T>
Rows<T> random_rows(Sizes s) {
  std::mt19937_64 random(static_cast<std::uint64_t>(7 * s.rows + s.key_dim));
  std::uniform_real_distribution<double> uniform(0, 1);
  Rows<T> out{random_buffer<T>(random, s.rows * s.key_dim),
              random_buffer<T>(random, s.rows * s.key_dim),
              random_buffer<T>(random, s.rows * s.value_dim),
              filled_buffer<T>(s.rows, 0),
              filled_buffer<T>(s.rows, 0),
              random_buffer<T>(random, s.key_dim * s.value_dim),
              random_buffer<T>(random, s.rows * s.value_dim),
              random_buffer<T>(random, s.key_dim * s.value_dim)};
  for (std::int64_t t = 0; t < s.rows; ++t) {
    const auto row = static_cast<std::size_t>(t);
    out.log_decay[row] = static_cast<T>(-uniform(random) * (t % 5 == 4 ? 20 : 0.1));
    out.beta[row] = static_cast<T>(uniform(random));
    for (std::vector<T>* const x : {&out.q, &out.k}) {
      double squares = 0;
      for (std::int64_t i = 0; i < s.key_dim; ++i) {
        const double value = (*x)[static_cast<std::size_t>(t * s.key_dim + i)];
        squares += value * value;
      }
      const double norm = std::sqrt(squares * (x == &out.q ? static_cast<double>(s.key_dim) : 1));
      for (std::int64_t i = 0; i < s.key_dim; ++i) {
        T& value = (*x)[static_cast<std::size_t>(t * s.key_dim + i)];
        value = static_cast<T>(value / norm);
      }
    }
  }
  return out;
}

template <class N>
struct Results {
  std::vector<N> o, end, q, k, v, log_decay, beta, start;
};

// o_t, S_t and their gradients, a row after the other.
template <class N, class T>
Results<N> plain(Sizes s, const Rows<T>& rows, bool reads) {
  const auto dk = static_cast<std::size_t>(s.key_dim), dv = static_cast<std::size_t>(s.value_dim),
             n = static_cast<std::size_t>(s.rows);
  const std::vector<N> q = numbers<N>(rows.q), k = numbers<N>(rows.k), v = numbers<N>(rows.v),
                       log_decay = numbers<N>(rows.log_decay), beta = numbers<N>(rows.beta),
                       grad_o = numbers<N>(rows.grad_o);
  Results<N> out{grad_o, numbers<N>(rows.start), q, k, v, log_decay, beta, numbers<N>(rows.grad_end)};
  std::vector<std::vector<N>> before;
  std::vector<N> errors(n * dv);
  std::vector<N>& state = out.end;
  for (std::size_t t = 0; t < n; ++t) {
    before.push_back(state);
    const N decay = std::exp(log_decay[t]);
    for (std::size_t j = 0; j < dv; ++j) {
      N seen = 0, o = 0;
      for (std::size_t i = 0; i < dk; ++i) seen += state[i * dv + j] * k[t * dk + i];
      const N error = errors[t * dv + j] = v[t * dv + j] - (reads ? decay * seen : 0);
      for (std::size_t i = 0; i < dk; ++i) {
        N& at = state[i * dv + j];
        at = decay * at + k[t * dk + i] * (beta[t] * error);
        o += at * q[t * dk + i];
      }
      out.o[t * dv + j] = o;
    }
  }
  std::vector<N>& grad = out.start;
  for (std::size_t t = n; t-- > 0;) {
    const std::vector<N>&after = t + 1 < n ? before[t + 1] : state, &start = before[t];
    const N decay = std::exp(log_decay[t]);
    N grad_beta = 0, grad_decay = 0;
    for (std::size_t i = 0; i < dk; ++i) {
      N sum = 0;
      for (std::size_t j = 0; j < dv; ++j) {
        sum += after[i * dv + j] * grad_o[t * dv + j];
        grad[i * dv + j] += q[t * dk + i] * grad_o[t * dv + j];
      }
      out.q[t * dk + i] = sum;
    }
    for (std::size_t j = 0; j < dv; ++j) {
      N sum = 0;
      for (std::size_t i = 0; i < dk; ++i) sum += k[t * dk + i] * grad[i * dv + j];
      grad_beta += sum * errors[t * dv + j];
      out.v[t * dv + j] = sum * beta[t];
    }
    for (std::size_t i = 0; i < dk; ++i) {
      N sum = 0;
      for (std::size_t j = 0; j < dv; ++j) {
        N& at = grad[i * dv + j];
        sum += at * beta[t] * errors[t * dv + j] - (reads ? decay * start[i * dv + j] * out.v[t * dv + j] : 0);
        at -= reads ? k[t * dk + i] * out.v[t * dv + j] : 0;
        grad_decay += at * start[i * dv + j];
        at *= decay;
      }
      out.k[t * dk + i] = sum;
    }
    out.log_decay[t] = decay * grad_decay;
    out.beta[t] = grad_beta;
  }
  return out;
}

template <class A>
DeltaRuleRanges<A> ranges() {
  return function_for_set(baseline::delta_rule_ranges<A>, avx2::delta_rule_ranges<A>, avx512::delta_rule_ranges<A>)();
}
template <class A>
std::vector<A> decays_of(const Rows<A>& rows) {
  std::vector<A> out = rows.log_decay;
  for (A& value : out) value = std::exp(value);
  return out;
}
template <class A>
HeadRows<A> head_of(Sizes s, const Rows<A>& rows, const std::vector<A>& decay, bool reads, std::int64_t first = 0) {
  return {s.rows - first,
          s.key_dim,
          s.value_dim,
          rows.q.data() + first * s.key_dim,
          rows.k.data() + first * s.key_dim,
          rows.v.data() + first * s.value_dim,
          decay.data() + first,
          rows.log_decay.data() + first,
          rows.beta.data() + first,
          reads};
}

template <class A>
Results<A> computed(Sizes s, const Rows<A>& rows, bool reads) {
  constexpr std::int64_t C = kStateBlockRows;
  const DeltaRuleRanges<A> rule = ranges<A>();
  const std::vector<A> decay = decays_of(rows);
  const HeadRows<A> head = head_of(s, rows, decay, reads);
  Results<A> out{filled_buffer<A>(s.rows * s.value_dim, 0),
                 rows.start,
                 filled_buffer<A>(s.rows * s.key_dim, 0),
                 filled_buffer<A>(s.rows * s.key_dim, 0),
                 filled_buffer<A>(s.rows * s.value_dim, 0),
                 filled_buffer<A>(s.rows, 0),
                 filled_buffer<A>(s.rows, 0),
                 rows.grad_end};
  auto room = filled_buffer<A>(forward_room(s.key_dim, sizeof(A)), 0);
  rule.forward(head, out.end.data(), out.o.data(), room.data());
  auto keys = filled_buffer<A>(C * C, 0), queries = keys, transposed = filled_buffer<A>(C * s.key_dim, 0);
  rule.products(head, keys.data(), queries.data(), transposed.data());
  room = filled_buffer<A>(backward_room(s.key_dim, s.value_dim), 0);
  rule.backward(head, keys.data(), queries.data(), rows.start.data(), rows.grad_o.data(), out.start.data(),
                {out.q.data(), out.k.data(), out.v.data(), out.log_decay.data(), out.beta.data()}, room.data());
  for (const std::vector<A>* const used : {&room, &keys, &queries, &transposed})
    for (std::size_t i = used->size() - kGuard; i < used->size(); ++i) EXPECT_EQ((*used)[i], A(kGuardValue));
  return out;
}

struct HeadCase {
  Sizes sizes;
  bool reads;  // the state, before it is written
};
std::vector<HeadCase> cases() {
  std::vector<HeadCase> out;
  for (const Sizes sizes : kHeads) out.insert(out.end(), {{sizes, true}, {sizes, false}});
  return out;
}

template <class A>
class DeltaRule : public ::testing::Test {};
using Numbers = ::testing::Types<float, double>;
TYPED_TEST_SUITE(DeltaRule, Numbers);

TYPED_TEST(DeltaRule, IsAsAccurateAsPlainLoopsOverRows) {
  using A = TypeParam;
  for (const auto& [s, reads] : cases()) {
    SCOPED_TRACE(::testing::Message() << s.rows << " rows, " << s.key_dim << " by " << s.value_dim << ", " << reads);
    const Rows<A> rows = random_rows<A>(s);
    const Results<A> loops = plain<A>(s, rows, reads);
    const Results<Exact<A>> exact = plain<Exact<A>>(s, rows, reads);
    for_each_set(1, [&] {
      const Results<A> own = computed(s, rows, reads);
      // A result behind a solve of 64 rows: as many roundings as lie on a way through it where few rows make one.
      const double roundings = 16;
      EXPECT_TRUE(as_good_as_plain(own.o, loops.o, exact.o, roundings));
      EXPECT_TRUE(as_good_as_plain(own.end, loops.end, exact.end, roundings));
      EXPECT_TRUE(as_good_as_plain(own.q, loops.q, exact.q, roundings));
      EXPECT_TRUE(as_good_as_plain(own.k, loops.k, exact.k, roundings));
      EXPECT_TRUE(as_good_as_plain(own.v, loops.v, exact.v, roundings));
      EXPECT_TRUE(as_good_as_plain(own.log_decay, loops.log_decay, exact.log_decay, roundings));
      EXPECT_TRUE(as_good_as_plain(own.beta, loops.beta, exact.beta, roundings));
      EXPECT_TRUE(as_good_as_plain(own.start, loops.start, exact.start, roundings));
    });
  }
}

// What a fork relies on.
TYPED_TEST(DeltaRule, GivesTheSameBitsWhereverRowsAreCut) {
  using A = TypeParam;
  for (const auto& [s, reads] : cases()) {
    const Rows<A> rows = random_rows<A>(s);
    const std::vector<A> decay = decays_of(rows);
    for_each_set(1, [&] {
      const Results<A> whole = computed(s, rows, reads);
      for (std::int64_t cut = 1; cut < s.rows; cut += 5) {
        std::vector<A> state = rows.start, o = filled_buffer<A>(s.rows * s.value_dim, 0),
                       room = filled_buffer<A>(forward_room(s.key_dim, sizeof(A)), 0);
        ranges<A>().forward(head_of({cut, s.key_dim, s.value_dim}, rows, decay, reads), state.data(), o.data(),
                            room.data());
        ranges<A>().forward(head_of(s, rows, decay, reads, cut), state.data(), o.data() + cut * s.value_dim,
                            room.data());
        EXPECT_TRUE(same_bits(o, whole.o));
        EXPECT_TRUE(same_bits(state, whole.end));
      }
    });
  }
}

}  // namespace
}  // namespace espalier
