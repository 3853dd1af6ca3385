// The recurrence of one head, gated delta rule, the same with decays of channels, and Mamba-2, against plain loops over
// rows.
#include "espalier/ops/cpu/delta_rule_ranges.h"

#include "espalier/base/instruction_set.h"
#include "espalier/ops/cpu/channel_decay_ranges.h"
#include "tests/unit/ops/row_kernels/row_cases.h"

namespace espalier {
namespace {

struct Sizes {
  std::int64_t rows, key_dim, value_dim;
};
// One row, odd numbers of rows and channels, a whole block, heads of published models.
constexpr Sizes kHeads[] = {{1, 1, 1},  {1, 7, 5},    {2, 3, 5},    {5, 16, 16},   {17, 7, 70},
                            {63, 8, 6}, {64, 16, 24}, {33, 20, 50}, {64, 128, 128}};

enum class Rule { delta, mamba, channels };
std::int64_t decays_of(Sizes s, Rule rule) { return rule == Rule::channels ? s.key_dim : 1; }  // of a row

// Rows, the state before them, what comes to their results and to the state behind them, as numbers N.
template <class N>
struct Rows {
  std::vector<N> q, k, v, log_decay, beta, start, grad_o, grad_end;
};
// Every fifth token forgets up to e^-20 of the state. Keys and queries have norm 1 and dk^-1/2.
template <class T>
Rows<T> random_rows(Sizes s, Rule rule) {
  std::mt19937_64 random(static_cast<std::uint64_t>(7 * s.rows + s.key_dim));
  std::uniform_real_distribution<double> uniform(0, 1);
  Rows<T> out{random_buffer<T>(random, s.rows * s.key_dim),
              random_buffer<T>(random, s.rows * s.key_dim),
              random_buffer<T>(random, s.rows * s.value_dim),
              filled_buffer<T>(s.rows * decays_of(s, rule), 0),
              filled_buffer<T>(s.rows, 0),
              random_buffer<T>(random, s.key_dim * s.value_dim),
              random_buffer<T>(random, s.rows * s.value_dim),
              random_buffer<T>(random, s.key_dim * s.value_dim)};
  for (std::int64_t t = 0; t < s.rows; ++t) {
    const auto row = static_cast<std::size_t>(t);
    for (std::size_t i = 0, count = static_cast<std::size_t>(decays_of(s, rule)); i < count; ++i)
      out.log_decay[row * count + i] = static_cast<T>(-uniform(random) * (t % 5 == 4 ? 20 : 0.1));
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
Results<N> plain(Sizes s, const Rows<T>& rows, Rule rule) {
  const bool reads = rule != Rule::mamba;
  const auto dk = static_cast<std::size_t>(s.key_dim), dv = static_cast<std::size_t>(s.value_dim),
             n = static_cast<std::size_t>(s.rows);
  const std::vector<N> q = numbers<N>(rows.q), k = numbers<N>(rows.k), v = numbers<N>(rows.v),
                       log_decay = numbers<N>(rows.log_decay), beta = numbers<N>(rows.beta),
                       grad_o = numbers<N>(rows.grad_o);
  Results<N> out{grad_o, numbers<N>(rows.start), q, k, v, log_decay, beta, numbers<N>(rows.grad_end)};
  const auto decay_at = [&](std::size_t t, std::size_t i) { return rule == Rule::channels ? t * dk + i : t; };
  const auto decay = [&](std::size_t t, std::size_t i) { return std::exp(log_decay[decay_at(t, i)]); };
  std::vector<std::vector<N>> before;
  std::vector<N> errors(n * dv);
  std::vector<N>& state = out.end;
  for (std::size_t t = 0; t < n; ++t) {
    before.push_back(state);
    for (std::size_t j = 0; j < dv; ++j) {
      N seen = 0, o = 0;
      for (std::size_t i = 0; i < dk; ++i) seen += decay(t, i) * state[i * dv + j] * k[t * dk + i];
      const N error = errors[t * dv + j] = v[t * dv + j] - (reads ? seen : 0);
      for (std::size_t i = 0; i < dk; ++i) {
        N& at = state[i * dv + j];
        at = decay(t, i) * at + k[t * dk + i] * (beta[t] * error);
        o += at * q[t * dk + i];
      }
      out.o[t * dv + j] = o;
    }
  }
  std::vector<N>& grad = out.start;
  for (std::size_t t = n; t-- > 0;) {
    const std::vector<N>&after = t + 1 < n ? before[t + 1] : state, &start = before[t];
    N grad_beta = 0;
    for (std::size_t i = 0; i < dk; ++i) out.log_decay[decay_at(t, i)] = 0;
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
        sum += at * beta[t] * errors[t * dv + j] - (reads ? decay(t, i) * start[i * dv + j] * out.v[t * dv + j] : 0);
        at -= reads ? k[t * dk + i] * out.v[t * dv + j] : 0;
        at *= decay(t, i);
        out.log_decay[decay_at(t, i)] += at * start[i * dv + j];
      }
      out.k[t * dk + i] = sum;
    }
    out.beta[t] = grad_beta;
  }
  return out;
}

template <class A>
DeltaRuleRanges<A> ranges() {
  return ESPALIER_FOR_SET(delta_rule_ranges<A>)();
}
template <class A>
ChannelDecayRanges<A> channel_ranges() {
  return ESPALIER_FOR_SET(channel_decay_ranges<A>)();
}
template <class A>
void forward(Rule rule, const HeadRows<A>& head, A* state, A* o, A* room) {
  (rule == Rule::channels ? channel_ranges<A>().forward : ranges<A>().forward)(head, state, o, room);
}
template <class A>
std::vector<A> decays_of(const Rows<A>& rows) {
  std::vector<A> out = rows.log_decay;
  for (A& value : out) value = std::exp(value);
  return out;
}
template <class A>
HeadRows<A> head_of(Sizes s, const Rows<A>& rows, const std::vector<A>& decay, Rule rule, std::int64_t first = 0) {
  return {s.rows - first,
          s.key_dim,
          s.value_dim,
          rows.q.data() + first * s.key_dim,
          rows.k.data() + first * s.key_dim,
          rows.v.data() + first * s.value_dim,
          decay.data() + first * decays_of(s, rule),
          rows.log_decay.data() + first * decays_of(s, rule),
          rows.beta.data() + first,
          rule != Rule::mamba};
}

template <class A>
Results<A> computed(Sizes s, const Rows<A>& rows, Rule rule) {
  constexpr std::int64_t C = kStateBlockRows;
  const std::vector<A> decay = decays_of(rows);
  const HeadRows<A> head = head_of(s, rows, decay, rule);
  Results<A> out{filled_buffer<A>(s.rows * s.value_dim, 0),
                 rows.start,
                 filled_buffer<A>(s.rows * s.key_dim, 0),
                 filled_buffer<A>(s.rows * s.key_dim, 0),
                 filled_buffer<A>(s.rows * s.value_dim, 0),
                 filled_buffer<A>(s.rows * decays_of(s, rule), 0),
                 filled_buffer<A>(s.rows, 0),
                 rows.grad_end};
  auto room = filled_buffer<A>(forward_room(s.key_dim, sizeof(A)), 0);
  forward(rule, head, out.end.data(), out.o.data(), room.data());
  auto keys = filled_buffer<A>(C * C, 0), queries = keys, transposed = filled_buffer<A>(C * s.key_dim, 0);
  const HeadGradients<A> to{out.q.data(), out.k.data(), out.v.data(), out.log_decay.data(), out.beta.data()};
  if (rule == Rule::channels) {
    room = filled_buffer<A>(channel_backward_room(s.key_dim, s.value_dim), 0);
    channel_ranges<A>().backward(head, rows.start.data(), rows.grad_o.data(), out.start.data(), to, room.data());
  } else {
    ranges<A>().products(head, keys.data(), queries.data(), transposed.data());
    room = filled_buffer<A>(backward_room(s.key_dim, s.value_dim), 0);
    ranges<A>().backward(head, keys.data(), queries.data(), rows.start.data(), rows.grad_o.data(), out.start.data(), to,
                         room.data());
  }
  for (const std::vector<A>* const used : {&room, &keys, &queries, &transposed})
    for (std::size_t i = used->size() - kGuard; i < used->size(); ++i) EXPECT_EQ((*used)[i], A(kGuardValue));
  return out;
}

struct HeadCase {
  Sizes sizes;
  Rule rule;
};
std::vector<HeadCase> cases() {
  std::vector<HeadCase> out;
  for (const Sizes sizes : kHeads)
    out.insert(out.end(), {{sizes, Rule::delta}, {sizes, Rule::mamba}, {sizes, Rule::channels}});
  return out;
}

template <class A>
class DeltaRule : public ::testing::Test {};
using Numbers = ::testing::Types<float, double>;
TYPED_TEST_SUITE(DeltaRule, Numbers);

TYPED_TEST(DeltaRule, IsAsAccurateAsPlainLoopsOverRows) {
  using A = TypeParam;
  for (const auto& [s, rule] : cases()) {
    SCOPED_TRACE(::testing::Message() << s.rows << " rows, " << s.key_dim << " by " << s.value_dim << ", rule "
                                      << static_cast<int>(rule));
    const Rows<A> rows = random_rows<A>(s, rule);
    const Results<A> loops = plain<A>(s, rows, rule);
    const Results<Exact<A>> exact = plain<Exact<A>>(s, rows, rule);
    for_each_set(1, [&] {
      const Results<A> own = computed(s, rows, rule);
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

// Forks rely on this.
TYPED_TEST(DeltaRule, GivesTheSameBitsWhereverRowsAreCut) {
  using A = TypeParam;
  for (const auto& [s, rule] : cases()) {
    const Rows<A> rows = random_rows<A>(s, rule);
    const std::vector<A> decay = decays_of(rows);
    for_each_set(1, [&] {
      const Results<A> whole = computed(s, rows, rule);
      for (std::int64_t cut = 1; cut < s.rows; cut += 5) {
        std::vector<A> state = rows.start, o = filled_buffer<A>(s.rows * s.value_dim, 0),
                       room = filled_buffer<A>(forward_room(s.key_dim, sizeof(A)), 0);
        forward(rule, head_of({cut, s.key_dim, s.value_dim}, rows, decay, rule), state.data(), o.data(), room.data());
        forward(rule, head_of(s, rows, decay, rule, cut), state.data(), o.data() + cut * s.value_dim, room.data());
        EXPECT_TRUE(same_bits(o, whole.o));
        EXPECT_TRUE(same_bits(state, whole.end));
      }
    });
  }
}

// log gamma = -softplus(x) for x from where e^x rounds to nothing beside 1 to where it is all.
TYPED_TEST(DeltaRule, DecaysOfChannelsAreAccurateForEveryStep) {
  using A = TypeParam;
  std::vector<A> x;
  for (double value = -60; value < 60; value += 0.37) x.push_back(static_cast<A>(value));
  std::vector<A> log_decay(x.size()), decay(x.size());
  for_each_set(1, [&] {
    channel_ranges<A>().decays(static_cast<std::int64_t>(x.size()), x.data(), A(-0.5), log_decay.data(), decay.data());
    for (std::size_t i = 0; i < x.size(); ++i) {
      const Exact<A> exact = Exact<A>(-0.5) * std::log1p(std::exp(static_cast<Exact<A>>(x[i])));
      constexpr Exact<A> kRoundings = 8 * static_cast<Exact<A>>(std::numeric_limits<A>::epsilon());
      EXPECT_NEAR(static_cast<double>(log_decay[i] / exact), 1, static_cast<double>(kRoundings)) << x[i];
      EXPECT_NEAR(static_cast<double>(decay[i]), static_cast<double>(std::exp(static_cast<Exact<A>>(log_decay[i]))),
                  static_cast<double>(kRoundings));
    }
  });
}

}  // namespace
}  // namespace espalier
