// The one rule for values that are not finite, in every format (docs/rollout_format.md, rule 13).
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "espalier/rollout/record_fields.h"

namespace espalier {

// A series of the response as `field` of a record: entry t stands at field[first + t].
struct SeriesPlace {
  const RecordPlace& record;
  std::string_view field;
  std::int64_t first = 0;
};

// Sets entries of tokens without loss that are not finite to 0. Errors: InputError for one of a token with loss.
void settle_series(std::vector<double>& series, const std::vector<std::uint8_t>& loss_mask, const SeriesPlace& place);

// The same for the sampler's log-probs, which may be missing for a token with loss: NaN then stands there. Returns the
// number of these tokens.
std::int64_t settle_sampled(std::vector<double>& series, const std::vector<std::uint8_t>& loss_mask);

}  // namespace espalier
