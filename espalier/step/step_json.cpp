#include "espalier/step/step_json.h"

namespace espalier {
namespace {

Json peaks_json(const PhasePeaks& peaks) { return {{"A", peaks.a}, {"B", peaks.b}, {"C", peaks.c}}; }

// A layer that was not counted is null.
Json router_json(const RouterReport& router) {
  Json load = Json::array();
  for (const auto& layer : router.load) load.push_back(layer.empty() ? Json() : Json(layer));
  return {{"counts", router.counts}, {"load", load}};
}

Json rows_json(const PassReport& pass) {
  return {{"logical", pass.plan.logical_rows},
          {"physical", pass.trunk_rows + pass.wave_rows},
          {"trunk", pass.trunk_rows},
          {"wave", pass.wave_rows}};
}

Json seconds_json(const StepSeconds& seconds) {
  return {{"total", seconds.total},
          {"plan", seconds.plan},
          {"counting", seconds.counting},
          {"trunk_forward", seconds.phases.trunk_forward},
          {"waves", seconds.phases.waves},
          {"trunk_backward", seconds.phases.trunk_backward},
          {"communication", seconds.communication},
          {"optimizer", seconds.optimizer}};
}

Json critic_json(const CriticReport& critic) {
  Json out;
  out["loss"] = critic.loss.loss;
  out["clip_fraction"] = critic.loss.clip_fraction;
  out["grad_norm"] = critic.update.grad_norm;
  out["lr"] = critic.update.lr;
  out["values_mean"] = critic.loss.values_mean;
  out["rows"] = rows_json(critic);
  out["schedule"] = schedule_name(critic);
  out["seconds"] = seconds_json(critic.seconds);
  out["seconds"]["values"] = critic.values_seconds;  // of the forward pass before; not in total
  out["arena_bytes"] = peaks_json(critic.arena_bytes);
  return out;
}

}  // namespace

std::string schedule_name(const PassReport& report) {
  if (report.schedules.size() > 1) return "mixed";
  return report.schedules.empty() ? "dense" : name_of(report.schedules.front());
}

namespace {

// Calls by axis, and one by one those that were started ahead of need.
Json collectives_json(const StepTraffic& traffic) {
  Json axes = Json::object(), ahead = Json::array();
  for (const StepTraffic::OfAxis& axis : traffic.by_axis())
    axes[std::string(axis.axis)] = {
        {"calls", axis.calls}, {"bytes", axis.bytes}, {"seconds", axis.seconds}, {"hidden_seconds", axis.hidden}};
  for (const auto& event : traffic.events)
    if (!event->of.empty())
      ahead.push_back({{"axis", event->axis},
                       {"call", event->call},
                       {"of", event->of},
                       {"bytes", event->bytes},
                       {"started", event->started - traffic.began},
                       {"wanted", event->wanted - traffic.began},
                       {"ended", event->ended - traffic.began},
                       {"hidden_seconds", event->hidden()}});
  Json out{{"by_axis", axes}, {"ahead", ahead}};
  if (traffic.last_backward_ended > 0)
    out["last_backward"] = {{"began", traffic.last_backward_began - traffic.began},
                            {"ended", traffic.last_backward_ended - traffic.began}};
  return out;
}

}  // namespace

Json profile_json(const StepProfile& profile) {
  Json out;
  for (const auto& [name, seconds] : profile.seconds) out["seconds"][name] = seconds;
  out["read_seconds"] = profile.read;
  out["product_flops_per_second"] = profile.product_flops_per_second;
  out["measured_flops_per_second"] = profile.measured_flops_per_second;
  out["product_rate_share"] = profile.product_rate_share();
  if (!profile.collectives.events.empty()) out["collectives"] = collectives_json(profile.collectives);
  return out;
}

Json step_json(const StepReport& step) {
  const GradientReport& g = step.gradient;
  Json out;
  out["step"] = step.step;
  out["loss"] = g.loss.loss;
  out["pg_loss"] = g.loss.pg_loss;
  out["kl_loss"] = g.loss.kl_loss;
  out["entropy"] = g.loss.entropy;
  out["aux_loss"] = g.router.aux_loss;
  out["z_loss"] = g.router.z_loss;
  out["clip_fraction"] = g.loss.clip_fraction;
  out["loss_tokens"] = g.loss.loss_tokens;
  for (std::size_t rule = 0; rule < kTokenRules; ++rule)
    if (token_rule_rows()[rule].reports() && g.loss.rules[rule].holds > 0)
      out[token_rule_rows()[rule].metric] = g.loss.rules[rule].mean;
  if (step.reward) out["reward"] = *step.reward;
  for (const auto& [name, value] : step.means) out[name] = value;
  out["grad_norm"] = step.update.grad_norm;
  out["lr"] = step.update.lr;
  out["schedule"] = schedule_name(g);
  out["rows"] = rows_json(g);
  out["trunk_forwards"] = g.trunk_forwards;
  if (!g.router.load.empty()) out["router"] = router_json(g.router);
  out["waves"] = g.plan.waves;
  out["seconds"] = seconds_json(g.seconds);
  out["peak_bytes"] = peaks_json(g.peak_bytes);
  out["arena_bytes"] = peaks_json(g.arena_bytes);
  out["predicted"] = {{"seconds", g.plan.chosen.seconds}, {"peak_bytes", peaks_json(g.plan.chosen.bytes)}};
  if (step.critic) out["critic"] = critic_json(*step.critic);
  if (g.profile) out["profile"] = profile_json(*g.profile);
  return out;
}

}  // namespace espalier
