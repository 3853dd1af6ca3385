#include "espalier/rollout/settled_series.h"

#include <cmath>
#include <limits>

namespace espalier {

void settle_series(std::vector<double>& series, const std::vector<std::uint8_t>& loss_mask, const SeriesPlace& place) {
  for (std::size_t t = 0; t < series.size(); ++t) {
    if (std::isfinite(series[t])) continue;
    if (loss_mask[t])
      throw place.record.wrong(text_of(place.field, "[", place.first + static_cast<std::int64_t>(t), "]"),
                               "a finite number, because the token has loss",
                               std::isnan(series[t]) ? "NaN or null"
                               : series[t] > 0       ? "Infinity"
                                                     : "-Infinity",
                               kFiniteRemedy);
    series[t] = 0;
  }
}

std::int64_t settle_sampled(std::vector<double>& series, const std::vector<std::uint8_t>& loss_mask) {
  std::int64_t missing = 0;
  for (std::size_t t = 0; t < series.size(); ++t) {
    if (std::isfinite(series[t])) continue;
    series[t] = loss_mask[t] ? std::numeric_limits<double>::quiet_NaN() : 0;
    missing += loss_mask[t];
  }
  return missing;
}

}  // namespace espalier
