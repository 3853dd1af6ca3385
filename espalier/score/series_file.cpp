#include "espalier/score/series_file.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "espalier/base/atomic_file.h"
#include "espalier/base/error.h"
#include "espalier/rollout/json_text.h"

namespace espalier {
namespace {

void append_series(std::string& line, const char* name, const std::vector<double>& values) {
  line += text_of(", \"", name, "\": [");
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (i > 0) line += ", ";
    append_number(line, values[i]);
  }
  line += ']';
}

}  // namespace

void write_series(const std::string& path, std::span<const Rollout> rollouts, std::span<const RolloutSeries> series) {
  std::vector<std::size_t> order(rollouts.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::sort(order, {}, [&](std::size_t i) { return rollouts[i].index; });
  AtomicFile file(path);
  for (const std::size_t i : order) {
    std::string line = text_of("{\"index\": ", rollouts[i].index);
    append_series(line, "logprobs", series[i].logprob);
    append_series(line, "entropies", series[i].entropy);
    line += "}\n";
    file.write(line);
  }
  file.commit();
}

}  // namespace espalier
