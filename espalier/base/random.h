// Random numbers that are the same on every machine: a counter, mixed with a key (splitmix64's finaliser; Steele, Lea
// and Flood, "Fast splittable pseudorandom number generators", 2014). A generator is 16 bytes, copies continue alike,
// and `fork(stream)` gives a generator whose numbers do not depend on how many were drawn from this one.
//
// Normal numbers use only +, *, /, sqrt and fma, which IEEE 754 rounds alike everywhere; every product that is added
// to something is an explicit fma, so that no compiler can contract one on some machines only.
#pragma once

#include <cmath>
#include <cstdint>

namespace espalier {

class Random {
 public:
  explicit Random(std::uint64_t seed, std::uint64_t stream = 0) : key_(mixed(mixed(seed) ^ stream * kOddStep)) {}

  // A generator for one use (a rollout, a parameter, a rank): depends on this one's seed and path of forks alone.
  Random fork(std::uint64_t stream) const { return Random(key_, stream + 1); }

  std::uint64_t bits() { return mixed(key_ + kGolden * ++drawn_); }

  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }  // [0, 1), steps of 2^-53
  double uniform(double low, double high) { return std::fma(high - low, uniform(), low); }
  bool chance(double probability) { return uniform() < probability; }

  // Uniform in [low, high], both included; unbiased.
  std::int64_t integer(std::int64_t low, std::int64_t high) {
    const std::uint64_t span = static_cast<std::uint64_t>(high) - static_cast<std::uint64_t>(low) + 1;
    if (span == 0) return static_cast<std::int64_t>(bits());  // all of int64
    const std::uint64_t uneven = (0 - span) % span;           // the first 2^64 mod span values would count twice
    std::uint64_t drawn = bits();
    while (drawn < uneven) drawn = bits();
    return static_cast<std::int64_t>(static_cast<std::uint64_t>(low) + drawn % span);
  }

  // Mean 0, deviation 1: Marsaglia's polar method, one of the pair used.
  double normal() {
    while (true) {
      const double u = uniform(-1, 1), v = uniform(-1, 1);
      const double square = std::fma(u, u, v * v);
      if (square > 0 && square < 1) return u * std::sqrt(-2 * natural_log(square) / square);
    }
  }

  // Position in the sequence, for a checkpoint that continues it.
  std::uint64_t key() const { return key_; }
  std::uint64_t drawn() const { return drawn_; }
  static Random restored(std::uint64_t key, std::uint64_t drawn) {
    Random random(0);
    random.key_ = key;
    random.drawn_ = drawn;
    return random;
  }

 private:
  static constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15u;
  static constexpr std::uint64_t kOddStep = 0xd1342543de82ef95u;

  static std::uint64_t mixed(std::uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

  // ln x = e ln 2 + 2 artanh s, s = (m - 1)/(m + 1), x = m 2^e, m in [sqrt 1/2, sqrt 2): s^2 < 0.0295, so the twelve
  // terms leave less than 1e-18. libm's log differs in the last bit between systems.
  static double natural_log(double x) {
    int exponent = 0;
    double m = std::frexp(x, &exponent);
    if (m < 0.70710678118654752) {
      m *= 2;
      --exponent;
    }
    const double s = (m - 1) / (m + 1), s2 = s * s;
    double series = 0;
    for (int n = 25; n >= 1; n -= 2) series = std::fma(series, s2, 1.0 / n);
    const double twice_s = 2 * s;
    return std::fma(static_cast<double>(exponent), 0.69314718055994531, twice_s * series);
  }

  std::uint64_t key_;
  std::uint64_t drawn_ = 0;
};

}  // namespace espalier
