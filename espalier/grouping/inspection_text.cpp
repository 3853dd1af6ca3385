// The inspection as a page for people.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>

#include "espalier/base/units.h"
#include "espalier/grouping/inspection.h"

namespace espalier {
namespace {

constexpr std::size_t kLabelWidth = 18, kColumnWidth = 14;

std::string padded(const std::string& text, std::size_t width) {
  return text.size() >= width ? text : std::string(width - text.size(), ' ') + text;
}

std::string labelled(std::string label) {
  label.resize(std::max(label.size(), kLabelWidth), ' ');
  return label;
}

std::string number_text(double value) {
  if (value == std::floor(value)) return format_count(static_cast<std::int64_t>(value));
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", value);
  return text;
}

std::string row(const std::string& label, const std::vector<std::string>& cells) {
  std::string out = labelled(label);
  for (const std::string& cell : cells) out += padded(cell, kColumnWidth);
  return out + '\n';
}

std::string quantile_row(const std::string& label, const Quantiles& q, std::string (*format)(double)) {
  return row(label, {format(q.min), format(q.p50), format(q.p95), format(q.max)});
}

std::string joined(const std::vector<std::string>& parts) {
  std::string out;
  for (const std::string& part : parts) out += (out.empty() ? "" : ", ") + part;
  return out.empty() ? "none" : out;
}

const char* sentence_of(const std::string& kind) {
  static const std::map<std::string, const char*> kSentences = {
      {"prompt_differs", "prompt differs inside a group"},
      {"empty_response", "empty response"},
      {"duplicate_response", "response equal to another of its group"},
      {"fully_masked", "no token with loss"},
      {"group_of_one", "group of one"},
      {"equal_rewards", "group whose rewards are all equal"},
      {"no_signal", "all rewards are equal in every group"},
      {"positive_logprob", "log-prob above 0"},
      {"nothing_to_learn", "neither reward nor advantage"},
      {"partial_steps", "step in some records only"},
      {"repeated_tokens", "sampled tokens that train again in another record of the run"},
      {"unequal_advantages", "turns of a trajectory with different recorded advantages"},
      {"zero_advantages", "turns with recorded advantage 0 beside others of their trajectory"},
  };
  const auto found = kSentences.find(kind);
  return found == kSentences.end() ? kind.c_str() : found->second;
}

std::string anomaly_lines(const std::vector<Anomaly>& anomalies) {
  if (anomalies.empty()) return labelled("anomalies") + "none\n";
  struct Kind {
    std::int64_t count = 0;
    const Anomaly* first = nullptr;
  };
  std::vector<std::string> order;
  std::map<std::string, Kind> kinds;
  for (const Anomaly& anomaly : anomalies) {
    Kind& kind = kinds[anomaly.kind];
    if (kind.count++ == 0) {
      kind.first = &anomaly;
      order.push_back(anomaly.kind);
    }
  }
  std::string out = labelled("anomalies") + format_count(static_cast<std::int64_t>(anomalies.size())) + '\n';
  for (const std::string& name : order) {
    const Kind& kind = kinds[name];
    out += padded(format_count(kind.count), 8) + "  " + sentence_of(name) + '\n';
    out += std::string(10, ' ') + (kind.count > 1 ? "first at " : "at ") + kind.first->where + ": ";
    out += kind.first->text + '\n';
  }
  return out;
}

std::string repeat_lines(const Inspection::Repeated& repeated) {
  std::string out;
  const auto line = [&](const char* label, std::int64_t tokens, const char* text) {
    if (tokens > 0) out += labelled(label) + padded(format_count(tokens), kColumnWidth) + "  " + text + '\n';
  };
  line("on branches", repeated.branches, "tokens with loss on several branches of a trajectory, trained once");
  line("in turns", repeated.trajectory, "tokens with loss in several records of a trajectory, trained in each");
  line("sampled alike", repeated.rollouts,
       "tokens with loss in several rollouts of a group, trained in each; if these are branches of one run, see "
       "docs/agents.md");
  return out;
}

// A row for each turn, with what it adds: the first kShown turns, the rest as one row.
std::string turn_rows(const Inspection& inspection) {
  constexpr std::size_t kShown = 10;
  const auto turn_row = [](const std::string& label, const Inspection::Turn& turn) {
    const double saved = turn.logical_tokens == 0
                             ? 0
                             : 1 - static_cast<double>(turn.physical_tokens) / static_cast<double>(turn.logical_tokens);
    return row(label, {format_count(turn.rollouts), format_count(turn.logical_tokens),
                       format_count(turn.physical_tokens), format_percent(saved)});
  };
  std::string out = row("turn", {"rollouts", "logical", "new", "saved"});
  Inspection::Turn rest;
  for (std::size_t k = 0; k < inspection.by_turn.size(); ++k) {
    const Inspection::Turn& turn = inspection.by_turn[k];
    if (k < kShown) {
      out += turn_row(std::to_string(k + 1), turn);
      continue;
    }
    rest.rollouts += turn.rollouts, rest.logical_tokens += turn.logical_tokens;
    rest.physical_tokens += turn.physical_tokens;
  }
  if (inspection.by_turn.size() > kShown) out += turn_row("later", rest);
  return out + '\n';
}

}  // namespace

std::string inspection_text(const Inspection& inspection) {
  std::string out;
  std::string count = format_count(inspection.rollouts) + " in " + format_count(inspection.groups) +
                      (inspection.groups == 1 ? " group" : " groups");
  if (inspection.steps > 0)
    count += ", " + format_count(inspection.steps) + (inspection.steps == 1 ? " step" : " steps");
  out += labelled("rollouts") + count + '\n';
  if (inspection.trajectories > 0) out += labelled("trajectories") + format_count(inspection.trajectories) + '\n';
  if (const std::int64_t sets = inspection.pairs + inspection.lists; sets > 0)
    out += labelled("sets") + format_count(inspection.pairs) + (inspection.pairs == 1 ? " pair, " : " pairs, ") +
           format_count(inspection.lists) +
           (inspection.lists == 1 ? " list of scored answers\n" : " lists of scored answers\n");
  out += labelled("fields") + joined(inspection.series) + "\n\n";
  out += row("", {"min", "median", "p95", "max"});
  out += quantile_row("rollouts a group", inspection.group_size, number_text);
  if (inspection.trajectories > 0) out += quantile_row("turns a trajectory", inspection.turns, number_text);
  out += quantile_row("prompt tokens", inspection.prompt_length, number_text);
  out += quantile_row("response tokens", inspection.response_length, number_text);
  out += quantile_row("shared in a group", inspection.prefix_share, format_percent);
  if (inspection.pairs + inspection.lists > 0) {
    out += quantile_row("answers a set", inspection.answers, number_text);
    out += quantile_row("shared in a set", inspection.set_share, format_percent);
  }
  out += '\n';
  out += row("", {"logical", "physical", "saved", "with loss"});
  out += row("tokens", {format_count(inspection.logical_tokens), format_count(inspection.physical_tokens),
                        format_percent(inspection.saved_share()), format_count(inspection.loss_tokens)});
  out += repeat_lines(inspection.repeated);
  out += '\n';
  if (inspection.trajectories > 0) out += turn_rows(inspection);
  out += anomaly_lines(inspection.anomalies);
  return out;
}

}  // namespace espalier
