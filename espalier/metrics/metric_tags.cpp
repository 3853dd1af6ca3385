#include "espalier/metrics/metric_tags.h"

#include <iterator>
#include <string_view>
#include <vector>

#include "espalier/base/json.h"

namespace espalier {
namespace {

constexpr MetricTag kTags[] = {
    {"step", "/loss", "actor/loss"},
    {"step", "/pg_loss", "actor/pg_loss"},
    {"step", "/kl_loss", "actor/kl_loss"},
    {"step", "/entropy", "actor/entropy"},
    {"step", "/aux_loss", "actor/router_aux_loss"},
    {"step", "/z_loss", "actor/router_z_loss"},
    {"step", "/clip_fraction", "actor/pg_clipfrac"},
    {"step", "/grad_norm", "actor/grad_norm"},
    {"step", "/lr", "actor/lr"},
    {"step", "/reward", "critic/score/mean"},
    {"step", "/reward_spread/std", "critic/score/std_in_group"},
    {"step", "/reward_spread/min", "critic/score/min"},
    {"step", "/reward_spread/max", "critic/score/max"},
    {"step", "/groups_without_variance", "train/groups_without_variance"},
    {"step", "/truncated", "response_length/clip_ratio"},
    {"step", "/tokens_per_second", "perf/throughput"},
    {"step", "/mfu", "perf/mfu/actor"},
    {"step", "/accuracy", "train/accuracy"},
    {"step", "/length/mean", "response_length/mean"},
    {"step", "/turns", "num_turns/mean"},
    {"step", "/length/max", "response_length/max"},
    {"step", "/groups_dropped", "train/groups_dropped"},
    {"step", "/tokens_saved", "perf/tokens_saved"},
    {"step", "/rows/logical", "perf/rows_logical"},
    {"step", "/rows/physical", "perf/rows_physical"},
    {"step", "/seconds/generate", "timing_s/gen"},
    {"step", "/seconds/score", "timing_s/old_log_prob"},
    {"step", "/seconds/update", "timing_s/update_actor"},
    {"step", "/seconds/total", "timing_s/optimizer_step"},
    {"step", "/seconds/plan", "timing_s/plan"},
    {"step", "/seconds/counting", "timing_s/counting"},
    {"step", "/seconds/trunk_forward", "timing_s/trunk_forward"},
    {"step", "/seconds/waves", "timing_s/waves"},
    {"step", "/seconds/trunk_backward", "timing_s/trunk_backward"},
    {"step", "/seconds/optimizer", "timing_s/optimizer"},
    {"step", "/critic/loss", "critic/vf_loss"},
    {"step", "/critic/clip_fraction", "critic/vf_clipfrac"},
    {"step", "/critic/values_mean", "critic/vpred_mean"},
    {"step", "/critic/grad_norm", "critic/grad_norm"},
    {"step", "/critic/lr", "critic/lr"},
    {"step", "/critic/seconds/values", "timing_s/values"},
    {"step", "/critic/seconds/total", "timing_s/update_critic"},
    {"step", "/predicted/seconds", "timing_s/predicted"},
    {"step", "/peak_bytes/A", "perf/peak_bytes/A"},
    {"step", "/peak_bytes/B", "perf/peak_bytes/B"},
    {"step", "/peak_bytes/C", "perf/peak_bytes/C"},
    {"step", "/predicted/peak_bytes/A", "perf/predicted_peak_bytes/A"},
    {"step", "/predicted/peak_bytes/B", "perf/predicted_peak_bytes/B"},
    {"step", "/predicted/peak_bytes/C", "perf/predicted_peak_bytes/C"},
    {"evaluation", "/accuracy", "val/accuracy"},
    {"evaluation", "/reward", "val/reward"},
    {"evaluation", "/length", "val/response_length"},
    {"evaluation", "/length/mean", "val/response_length"},
    {"evaluation", "/turns", "val/num_turns"},
    {"warm_start", "/loss", "warm_start/loss"},
    {"warm_start", "/right", "warm_start/accuracy"},
    {"warm_start", "/prompt_length", "warm_start/prompt_length"},
};

}  // namespace

std::span<const MetricTag> metric_tags() {
  static const std::vector<MetricTag> tags = [] {
    std::vector<MetricTag> out(std::begin(kTags), std::end(kTags));
#define ESPALIER_TOKEN_RULE(name, option, condition, sees, ratio, changes, metric) \
  out.push_back({"step", "/" metric, "actor/" metric});
#include "espalier/options/token_rules.def"
    std::erase_if(out, [](const MetricTag& tag) { return std::string_view(tag.field) == "/"; });
    return out;
  }();
  return tags;
}

void for_each_scalar(const Json& line, const std::function<void(const char* tag, double value)>& use) {
  const std::string kind = line.value("kind", "");
  for (const MetricTag& row : metric_tags()) {
    if (kind != row.kind) continue;
    const Json::json_pointer field(row.field);
    if (line.contains(field) && line.at(field).is_number()) use(row.tag, line.at(field).get<double>());
  }
}

void add_scalars(EventFile& events, const Json& line) {
  const std::int64_t step = line.value("step", std::int64_t{0});
  for_each_scalar(line, [&](const char* tag, double value) { events.scalar(tag, step, value); });
}

}  // namespace espalier
