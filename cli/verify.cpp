// `verify`: the verdict, the worst parameters, and what was compared.
#include "espalier/prove/verify.h"

#include <algorithm>
#include <iomanip>
#include <sstream>

#include "cli/verbs.h"
#include "espalier/base/error.h"
#include "espalier/base/quantised_rows.h"
#include "espalier/base/units.h"

namespace espalier::cli {
namespace {

constexpr double kShownRatio = 1e4;  // a larger one is only "beyond"

Json choices_json(const moe::ChoiceDifference& d) {
  return {{"choices", d.choices}, {"differing", d.differing}, {"share", d.share()}};
}

Json verdict_json(const Verdict& verdict) {
  Json out;
  out["verdict"] = verdict.pass() ? "pass" : "fail";
  const ParameterCheck& worst = verdict.worst();
  out["worst"] = {{"parameter", worst.name},
                  {"error", worst.distance.error},
                  {"floor", worst.distance.floor},
                  {"allowed", worst.distance.allowed},
                  {"ratio", worst.distance.ratio()}};
  out["parameters"] = Json::array();
  for (const ParameterCheck& p : verdict.parameters)
    out["parameters"].push_back({{"name", p.name},
                                 {"error", p.distance.error},
                                 {"floor", p.distance.floor},
                                 {"allowed", p.distance.allowed},
                                 {"cosine", p.cosine}});
  out["logprob"] = {{"max", verdict.logprob.error},
                    {"floor", verdict.logprob.floor},
                    {"allowed", verdict.logprob.allowed},
                    {"other_bits", verdict.other_bits}};
  out["loss"] = {{"dense", verdict.loss_dense}, {"shared", verdict.loss_shared}, {"allowed", verdict.loss.allowed}};
  if (verdict.router) out["router"] = choices_json(*verdict.router);
  if (verdict.quantised_matrices > 0)
    out[text_of(quantised::rows_of(verdict.quantised_kind).word, "_matrices")] = verdict.quantised_matrices;
  if (verdict.critic) {
    const Verdict::CriticPart& critic = *verdict.critic;
    out["values"] = {{"max", critic.values.error}, {"floor", critic.values.floor}, {"allowed", critic.values.allowed}};
    out["critic_loss"] = {
        {"dense", critic.loss_dense}, {"shared", critic.loss_shared}, {"allowed", critic.loss.allowed}};
    if (critic.router) out["critic_router"] = choices_json(*critic.router);
  }
  out["optimizer"] = {{"max_abs", verdict.optimizer.error}, {"floor", verdict.optimizer.floor}};
  out["schedules"] = Json::array();
  for (const ScheduleCheck& s : verdict.schedules)
    out["schedules"].push_back({{"name", s.name},
                                {"rows", s.physical_rows},
                                {"trunks", s.trunks},
                                {"waves", s.waves},
                                {"worst_ratio", s.worst_ratio}});
  out["gradient_norm"] = verdict.gradient_norm;
  out["rows"] = {{"logical", verdict.logical_rows}};
  return out;
}

std::string ratio_text(double ratio, int digits) {
  std::ostringstream out;
  if (ratio < kShownRatio)
    out << std::fixed << std::setprecision(digits) << ratio;
  else
    out << "beyond";
  return out.str();
}

void print_row(std::ostream& out, const std::string& name, const Distance& d) {
  out << "  " << std::left << std::setw(46) << name << std::right << std::scientific << std::setprecision(2)
      << std::setw(12) << d.error << std::setw(12) << d.floor << std::setw(12) << d.allowed << std::setw(9)
      << ratio_text(d.ratio(), 2) << (d.ratio() <= 1 ? "" : "   FAIL") << "\n"
      << std::defaultfloat;
}

void print_choices(std::ostream& out, const std::string& name, const moe::ChoiceDifference& d) {
  out << "  " << name << " chooses experts as in float64; choosing freely, dense differs in "
      << format_count(d.differing) << " of " << format_count(d.choices) << " choices (" << std::fixed
      << std::setprecision(2) << 100 * d.share() << " %)\n"
      << std::defaultfloat;
}

// `series`: what the loss is a function of, "log-probs" or "scores".
void print(std::ostream& out, const Verdict& verdict, const std::string& series) {
  out << format_count(verdict.rollouts) << " rollouts, " << format_count(verdict.logical_rows)
      << " tokens: one step dense, and shared in " << verdict.schedules.size() << " ways\n\n";
  for (const ScheduleCheck& s : verdict.schedules)
    out << "  " << std::left << std::setw(44) << s.name << std::right << std::setw(11) << format_count(s.physical_rows)
        << " rows" << std::setw(6) << s.trunks << " trunks" << std::setw(6) << s.waves << " waves   largest error "
        << ratio_text(s.worst_ratio, 2) << (s.worst_ratio < kShownRatio ? "x the tolerance\n" : " the tolerance\n");
  out << "\n  " << std::left << std::setw(46) << "farthest from dense" << std::right << std::setw(12) << "error"
      << std::setw(12) << "floor" << std::setw(12) << "tolerance" << std::setw(9) << "ratio"
      << "\n";
  std::vector<ParameterCheck> sorted = verdict.parameters;
  std::ranges::sort(sorted, std::greater<>(), [](const ParameterCheck& p) { return p.distance.ratio(); });
  sorted.resize(std::min<std::size_t>(sorted.size(), 5));
  for (const ParameterCheck& p : sorted) print_row(out, p.name, p.distance);
  print_row(out, series + " (absolute)", verdict.logprob);
  print_row(out, "loss (absolute)", verdict.loss);
  if (verdict.other_bits == 0)
    out << "  " << series << " are bitwise equal to dense in every schedule\n";
  else
    out << "  " << series << " of " << format_count(verdict.other_bits)
        << " response tokens have other bits than dense in some schedule\n";
  if (verdict.critic) {
    print_row(out, "critic: values (absolute)", verdict.critic->values);
    print_row(out, "critic: loss (absolute)", verdict.critic->loss);
  }
  out << "  weights after one optimizer step differ by at most " << std::scientific << std::setprecision(2)
      << verdict.optimizer.error << " (two dense runs: " << verdict.optimizer.floor << ")\n"
      << std::defaultfloat;
  if (verdict.quantised_matrices > 0)
    out << "  " << format_count(verdict.quantised_matrices) << " frozen matrices are held as "
        << quantised::rows_of(verdict.quantised_kind).name
        << ": every run, the one in float64 too, uses the numbers that their codes stand for\n";
  if (verdict.router) print_choices(out, "every run", *verdict.router);
  if (verdict.critic && verdict.critic->router) print_choices(out, "critic: every run", *verdict.critic->router);
  if (verdict.gradient_norm == 0)
    out << "  the gradient is exactly zero (are all advantages 0?): only " << series << " and the loss say something\n";
  out << "\n";
  out << (verdict.pass() ? "PASS: shared and dense are the same step.\n"
                         : "FAIL: shared and dense differ by more than rounding.\n");
}

}  // namespace

int run_verify(Context& context) {
  const Verdict verdict = verify(context.options, context.progress, context.mesh);
  context.result.update(verdict_json(verdict));
  print(context.text, verdict, context.options.objective == ObjectiveKind::reward ? "scores" : "log-probs");
  return verdict.pass() ? 0 : kFailedVerification;
}

}  // namespace espalier::cli
