#include "espalier/rollout/recorded_experts.h"

#include <algorithm>

#include "espalier/rollout/json_text.h"

namespace espalier {
void sort_recorded_experts(RecordedExperts& experts) {
  for (auto layer = experts.ids.begin(); layer != experts.ids.end(); layer += experts.chosen)
    std::sort(layer, layer + experts.chosen);
}

std::string recorded_experts_json(const RecordedExperts& experts) {
  std::string out = "[";
  const std::uint16_t* id = experts.ids.data();
  const std::int32_t width = experts.layers * experts.chosen;
  const auto free = [](std::uint16_t expert) { return expert == RecordedExperts::kFree; };
  for (std::int32_t t = 0; t < experts.tokens; ++t) {
    out += t > 0 ? "," : "";
    if (std::all_of(id, id + width, free)) {
      out += "null";
      id += width;
      continue;
    }
    for (std::int32_t l = 0; l < experts.layers; ++l)
      for (std::int32_t j = 0; j < experts.chosen; ++j, ++id) {
        out += j > 0 ? "," : l > 0 ? "],[" : "[[";
        append_number(out, free(*id) ? std::int64_t{-1} : std::int64_t{*id});
      }
    out += "]]";
  }
  return out + "]";
}

}  // namespace espalier
