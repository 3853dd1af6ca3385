#include "espalier/objective/kl.h"

#include <algorithm>
#include <cmath>

namespace espalier {

namespace {
constexpr double kExponentBound = 20;  // verl's bound on the exponent of k3
constexpr double kValueBound = 10;     // and on its value

KlTerm low_variance_term(double x) {
  const double exponent = std::clamp(-x, -kExponentBound, kExponentBound);
  const double value = std::expm1(exponent) - exponent;
  // Where the exponent is held at its bound, the value is beyond its own.
  return {std::min(value, kValueBound), value <= kValueBound ? -std::expm1(exponent) : 0.0};
}

KlTerm unbounded_term(double x) { return {std::expm1(-x) + x, -std::expm1(-x)}; }
}  // namespace

KlType kl_type_of(KlLossType type) {
  enum class Gradient { own, of_k2 };
  static constexpr KlType kTypes[] = {
#define ESPALIER_KL_TYPE(name, word, estimator, gradient) \
  {KlEstimator::estimator, Gradient::gradient == Gradient::of_k2},
#include "espalier/options/kl_types.def"
  };
  return kTypes[static_cast<std::size_t>(type)];
}

KlTerm kl_term(KlType type, double logprob, double ref_logprob) {
  const double x = logprob - ref_logprob;
  KlTerm term;
  switch (type.estimator) {
    case KlEstimator::k1:
      term = {x, 1.0};
      break;
    case KlEstimator::absolute:
      term = {std::abs(x), x > 0 ? 1.0 : x < 0 ? -1.0 : 0.0};
      break;
    case KlEstimator::k2:
      term = {0.5 * x * x, x};
      break;
    case KlEstimator::k3:
      term = low_variance_term(x);
      break;
    case KlEstimator::k3_unbounded:
    case KlEstimator::k3_unbiased:
      term = unbounded_term(x);
      break;
  }
  if (type.straight_through) term.gradient = x;
  return term;
}

}  // namespace espalier
