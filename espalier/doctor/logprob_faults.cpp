#include "espalier/doctor/logprob_faults.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <string>

#include "espalier/base/error.h"

namespace espalier {
namespace {

constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

struct SeriesName {
  const char* name;
  std::vector<double> Rollout::*values;
};

// The log-probs that an explanation expects at the tokens of a row; NaN where it says nothing.
using Expected = std::vector<double>;

struct Explanation {
  Fault fault;
  std::string text;  // what the series is, for the finding
  std::function<Expected(std::size_t row)> of;
};

// The tokens of a row that can be compared.
struct Row {
  std::size_t place = 0;  // in the sample
  std::vector<std::size_t> tokens;
  double allowed = 0;  // mean distance
};

double distance(const Row& row, const std::vector<double>& recorded, const Expected& expected) {
  double sum = 0;
  std::int64_t count = 0;
  for (const std::size_t t : row.tokens)
    if (std::isfinite(expected[t])) sum += std::abs(recorded[t] - expected[t]), ++count;
  // An explanation that says nothing about most tokens explains nothing.
  return 2 * count < static_cast<std::int64_t>(row.tokens.size()) ? std::numeric_limits<double>::infinity()
                                                                  : sum / static_cast<double>(count);
}

template <class Value>
Expected each(const std::vector<TokenProbe>& tokens, const Value& value) {
  Expected out;
  for (const TokenProbe& token : tokens) out.push_back(value(token));
  return out;
}

// ---- kept sets -------------------------------------------------------------------------------------------------

// Sampling rules that leave the most likely tokens of a distribution. The mass that a rule keeps follows from the
// descending probabilities; the sampled token is always kept.
struct Rule {
  std::int64_t top_k = 0;  // 0: off
  double top_p = 1, min_p = 0;

  std::string text() const {
    std::string out;
    if (top_k > 0) out += text_of("top-k ", top_k);
    if (top_p < 1) out += text_of(out.empty() ? "" : " and ", "top-p ", top_p);
    if (min_p > 0) out += text_of("min-p ", min_p);
    return out;
  }

  // The logarithm of the mass that is kept; NaN where it needs less likely tokens than are known.
  double log_mass(const TokenProbe& token) const {
    const auto known = static_cast<std::int64_t>(token.top.size());
    const bool whole = known > 0 && std::abs(total(token, known) - 1) < 1e-6;  // all tokens of a small vocabulary
    const std::int64_t limit = top_k > 0 ? std::min(top_k, known) : known;
    if (top_k > known && !whole) return kUnknown;
    const double of_k = top_k > 0 ? total(token, limit) : 1;
    double mass = 0;
    std::int64_t kept = 0;
    for (; kept < limit; ++kept) {
      const double probability = std::exp(static_cast<double>(token.top[static_cast<std::size_t>(kept)]));
      if (min_p > 0 && probability < min_p * std::exp(token.greatest)) break;
      if (mass >= top_p * of_k) break;
      mass += probability;
    }
    if (kept == known && !whole && (top_p < 1 || min_p > 0)) return kUnknown;
    const bool has_sampled =
        kept > 0 && token.full_logprob >= static_cast<double>(token.top[static_cast<std::size_t>(kept - 1)]) - 1e-6;
    if (!has_sampled) return kUnknown;  // the rule would not have drawn it
    return std::log(std::min(mass, 1.0));
  }

 private:
  static double total(const TokenProbe& token, std::int64_t count) {
    double sum = 0;
    for (std::int64_t k = 0; k < count; ++k)
      sum += std::exp(static_cast<double>(token.top[static_cast<std::size_t>(k)]));
    return sum;
  }
};

std::vector<Rule> usual_rules() {
  std::vector<Rule> out;
  for (const double p : {0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999}) {
    out.push_back({0, p, 0});
    for (const std::int64_t k : {10, 20, 40, 50, 64, 100}) out.push_back({k, p, 0});
  }
  for (std::int64_t k = 1; k <= 20; ++k) out.push_back({k, 1, 0});
  for (const std::int64_t k : {25, 30, 32, 40, 50, 64, 80, 100, 128, 200, 256, 500}) out.push_back({k, 1, 0});
  for (const double p : {0.01, 0.02, 0.05, 0.1, 0.2}) out.push_back({0, 1, p});
  return out;
}

// ---- one series ------------------------------------------------------------------------------------------------

std::vector<std::int64_t> dump_rows(const Replayed& replayed, const std::vector<Row>& rows) {
  std::vector<std::int64_t> out;
  for (const Row& row : rows) out.push_back(replayed.rollouts[row.place].index);
  std::ranges::sort(out);
  return out;
}

class SeriesJudge {
 public:
  SeriesJudge(const Replayed& replayed, const SeriesName& series) : replayed_(replayed), series_(series) { gather(); }

  std::vector<Finding> judge() {
    std::vector<Row> failing;
    for (const Row& row : rows_)
      if (distance_of(row, as_it_should_be()) > row.allowed) failing.push_back(row);
    if (failing.empty()) {
      look_for_small(rows_);
      return std::move(findings_);
    }
    take_unrecorded(failing);
    explanations_of_logprobs();
    while (!failing.empty() && explain(failing)) {
    }
    if (!failing.empty()) explain_by_experts(failing);
    if (!failing.empty()) by_other_weights(failing);
    return std::move(findings_);
  }

 private:
  const std::vector<double>& recorded(const Row& row) const { return replayed_.rollouts[row.place].*series_.values; }
  const std::vector<TokenProbe>& probe(std::size_t place) const { return replayed_.probe[place]; }
  double distance_of(const Row& row, const Explanation& explanation) const {
    return distance(row, recorded(row), explanation.of(row.place));
  }
  Explanation as_it_should_be() const {
    return {Fault::unexplained_logprobs, "", [this](std::size_t place) {
              return each(probe(place), [](const TokenProbe& token) { return token.logprob; });
            }};
  }

  void gather() {
    double noise = 0;
    std::int64_t tokens = 0;
    std::vector<double> own_noise;
    for (std::size_t i = 0; i < replayed_.rollouts.size(); ++i) {
      const Rollout& rollout = replayed_.rollouts[i];
      const std::vector<double>& values = rollout.*series_.values;
      Row row{i, {}, 0};
      double own = 0;
      for (std::size_t t = 0; t < values.size(); ++t) {
        if (rollout.loss_mask[t] == 0 || !std::isfinite(values[t])) continue;
        row.tokens.push_back(t);
        own += std::abs(replayed_.rounded[i][t].logprob - probe(i)[t].logprob);
      }
      if (row.tokens.empty()) continue;
      noise += own, tokens += static_cast<std::int64_t>(row.tokens.size());
      own_noise.push_back(own / static_cast<double>(row.tokens.size()));
      rows_.push_back(std::move(row));
    }
    if (tokens == 0) return;
    noise /= static_cast<double>(tokens);
    noise_ = noise;
    for (std::size_t r = 0; r < rows_.size(); ++r)
      rows_[r].allowed =
          2 * std::max(noise, own_noise[r]) * (1 + 3 / std::sqrt(static_cast<double>(rows_[r].tokens.size())));
  }

  void explanations_of_logprobs() {
    for (const int shift : {1, -1})
      explanations_.push_back({Fault::shifted_logprobs,
                               text_of("are those of the token ", shift > 0 ? "after" : "before", " it"),
                               [this, shift](std::size_t place) {
                                 const auto& tokens = probe(place);
                                 Expected out(tokens.size(), kUnknown);
                                 for (std::size_t t = 0; t < tokens.size(); ++t) {
                                   const auto other = static_cast<std::int64_t>(t) + shift;
                                   if (other >= 0 && other < std::ssize(tokens))
                                     out[t] = tokens[static_cast<std::size_t>(other)].logprob;
                                 }
                                 return out;
                               }});
    explanations_.push_back(
        {Fault::other_temperature, "are at temperature 1, without that of the records", [this](std::size_t place) {
           return each(probe(place), [](const TokenProbe& token) { return token.unscaled; });
         }});
    explanations_.push_back(
        {Fault::other_temperature,
         "are log-probs at temperature 1 divided by the temperature, which belongs under the logits",
         [this](std::size_t place) {
           const double temperature = replayed_.rollouts[place].temperature;
           return each(probe(place), [temperature](const TokenProbe& token) {
             return temperature == 1 ? kUnknown : token.unscaled / temperature;
           });
         }});
    const std::vector<double> temperatures = usual_temperatures();
    for (std::size_t g = 0; g < temperatures.size(); ++g)
      explanations_.push_back(
          {Fault::other_temperature, text_of("are at temperature ", temperatures[g]), [this, g](std::size_t place) {
             return each(probe(place), [g](const TokenProbe& token) { return static_cast<double>(token.at[g]); });
           }});
    for (const Rule& rule : usual_rules())
      explanations_.push_back(
          {Fault::kept_sets_missing,
           text_of("are over the tokens that ", rule.text(), " leaves, and the records do not have these"),
           [this, rule](std::size_t place) {
             return each(probe(place),
                         [&rule](const TokenProbe& token) { return token.full_logprob - rule.log_mass(token); });
           }});
    explanations_.push_back(
        {Fault::kept_sets_missing, "are over the whole vocabulary, although the records have kept sets",
         [this](std::size_t place) {
           const bool has = !replayed_.rollouts[place].kept_sets.empty();
           return each(probe(place), [has](const TokenProbe& token) { return has ? token.full_logprob : kUnknown; });
         }});
  }

  // Rows that are as they should be but for tokens with a recorded 0, which the model does not expect: tokens that it
  // did not sample, such as a tool's. Rows of zeros alone are found without a model.
  void take_unrecorded(std::vector<Row>& failing) {
    std::vector<Row> found, rest;
    std::int64_t zeros = 0;
    for (Row& row : failing) {
      Row others = row;
      std::erase_if(others.tokens, [&](std::size_t t) { return recorded(row)[t] == 0; });
      const auto left_out = static_cast<std::int64_t>(row.tokens.size() - others.tokens.size());
      const bool all = others.tokens.empty();
      const bool fits = left_out > 0 && (all || distance_of(others, as_it_should_be()) <= row.allowed);
      if (fits) zeros += left_out;
      if (fits && !all) found.push_back(std::move(row));
      if (!fits) rest.push_back(std::move(row));
    }
    failing = std::move(rest);
    if (!found.empty())
      findings_.push_back(
          {Fault::unrecorded_logprobs, Sure::certain, dump_rows(replayed_, found),
           text_of(series_.name, " are exactly 0 at ", zeros,
                   " tokens with loss, and the model's at the others of these rows: they were not recorded, "
                   "or are of tokens that the model did not sample")});
  }

  // The explanation nearest to all rows, with its mean distance.
  std::pair<const Explanation*, double> nearest(const std::vector<Row>& rows) const {
    std::pair<const Explanation*, double> best{nullptr, std::numeric_limits<double>::infinity()};
    for (const Explanation& explanation : explanations_) {
      double sum = 0, tokens = 0;
      for (const Row& row : rows) {
        const auto count = static_cast<double>(row.tokens.size());
        // A row that the explanation does not hold for counts with what it is off as it should be.
        const double off = std::min(distance_of(row, explanation), distance_of(row, as_it_should_be()));
        sum += off * count, tokens += count;
      }
      if (tokens > 0 && sum / tokens < best.second) best = {&explanation, sum / tokens};
    }
    return best;
  }

  double mean(const std::vector<Row>& rows, const Explanation& explanation) const {
    double sum = 0, tokens = 0;
    for (const Row& row : rows) {
      const auto count = static_cast<double>(row.tokens.size());
      sum += distance_of(row, explanation) * count, tokens += count;
    }
    return sum / tokens;
  }

  // Takes the rows that the nearest explanation holds for out of `failing`; false where it holds for none.
  bool explain(std::vector<Row>& failing) {
    const auto [best, off] = nearest(failing);
    if (best == nullptr) return false;
    std::vector<Row> explained, rest;
    for (Row& row : failing) {
      const double own = distance_of(row, *best);
      (own <= row.allowed && own < distance_of(row, as_it_should_be()) / 2 ? explained : rest)
          .push_back(std::move(row));
    }
    failing = std::move(rest);
    if (explained.empty()) return false;
    report(*best, explained);
    return true;
  }

  void report(const Explanation& explanation, const std::vector<Row>& rows) {
    std::int64_t tokens = 0;
    for (const Row& row : rows) tokens += static_cast<std::int64_t>(row.tokens.size());
    findings_.push_back({explanation.fault, tokens >= kEnough ? Sure::certain : Sure::likely,
                         dump_rows(replayed_, rows),
                         text_of(series_.name, " ", explanation.text, ": the mean distance at ", tokens, " tokens is ",
                                 mean(rows, explanation), " so, ", mean(rows, as_it_should_be()),
                                 " as they should be; rounding to bfloat16 makes ", noise_)});
  }

  // Within the rounding of bfloat16, but far outside of their own: the series were computed in higher precision.
  void look_for_small(const std::vector<Row>& rows) {
    if (rows.empty()) return;
    explanations_of_logprobs();
    const auto [best, off] = nearest(rows);
    if (best == nullptr) return;
    std::vector<Row> better;
    std::int64_t closer = 0, farther = 0;
    for (const Row& row : rows) {
      const Expected expected = best->of(row.place), right = as_it_should_be().of(row.place);
      if (distance_of(row, *best) < distance_of(row, as_it_should_be()) / 8) better.push_back(row);
      for (const std::size_t t : row.tokens) {
        if (!std::isfinite(expected[t]) || expected[t] == right[t]) continue;
        const double a = std::abs(recorded(row)[t] - expected[t]), b = std::abs(recorded(row)[t] - right[t]);
        closer += a<b / 8, farther += a> b;
      }
    }
    // By chance a token is closer by so much one time in eight at most; ten such tokens without one against them are
    // one in a thousand million.
    if (better.size() == rows.size() && closer >= 10 && farther == 0) report(*best, better);
  }

  void explain_by_experts(std::vector<Row>& failing) {
    const bool recorded_any = std::ranges::any_of(
        failing, [&](const Row& row) { return replayed_.rollouts[row.place].recorded_experts.tokens > 0; });
    if (!recorded_any || !replayed_.again) return;
    for (const int shift : {1, -1, 0}) {
      std::vector<Rollout> others;
      for (const Row& row : failing) {
        Rollout other = replayed_.rollouts[row.place];
        shift == 0 ? void(other.recorded_experts = {}) : shift_experts(other.recorded_experts, shift);
        others.push_back(std::move(other));
      }
      const Probe found = replayed_.again(others);
      std::vector<Row> explained, rest;
      double before = 0, after = 0, tokens = 0;
      for (std::size_t r = 0; r < failing.size(); ++r) {
        const Row& row = failing[r];
        const double own =
            distance(row, recorded(row), each(found[r], [](const TokenProbe& token) { return token.logprob; }));
        const double was = distance_of(row, as_it_should_be());
        const bool holds = own <= row.allowed && own < was / 2;
        const auto count = static_cast<double>(row.tokens.size());
        if (holds) before += was * count, after += own * count, tokens += count;
        (holds ? explained : rest).push_back(row);
      }
      if (explained.empty()) continue;
      const char* const text = shift == 0  ? "without routed_experts, which are of other tokens or other weights"
                               : shift > 0 ? "with routed_experts one token later than they are recorded"
                                           : "with routed_experts one token earlier than they are recorded";
      findings_.push_back({shift == 0 ? Fault::stale_routes : Fault::shifted_routes, Sure::certain,
                           dump_rows(replayed_, explained),
                           text_of(series_.name, " are the model's ", text, ": the mean distance at ", tokens,
                                   " tokens is ", after / tokens, " so, ", before / tokens, " as recorded")});
      failing = std::move(rest);
      if (failing.empty()) return;
    }
  }

  // Token t gets the record of token t - shift.
  static void shift_experts(RecordedExperts& experts, int shift) {
    const auto width = static_cast<std::size_t>(experts.layers) * static_cast<std::size_t>(experts.chosen);
    const std::vector<std::uint16_t> ids = experts.ids;
    for (std::int64_t t = 0; t < experts.tokens; ++t) {
      const std::int64_t from = t - shift;
      for (std::size_t k = 0; k < width; ++k)
        experts.ids[static_cast<std::size_t>(t) * width + k] = from < 0 || from >= experts.tokens
                                                                   ? RecordedExperts::kFree
                                                                   : ids[static_cast<std::size_t>(from) * width + k];
    }
  }

  // Log-probs of the distribution that the tokens were drawn from have a mean ratio to any others of 1.
  void by_other_weights(const std::vector<Row>& failing) {
    double sum = 0, squares = 0, n = 0, kl = 0;
    for (const Row& row : failing)
      for (const std::size_t t : row.tokens) {
        const double d = probe(row.place)[t].logprob - recorded(row)[t], ratio = std::exp(std::clamp(d, -20.0, 20.0));
        sum += ratio, squares += ratio * ratio, n += 1, kl += ratio - 1 - d;
      }
    const double ratio = sum / n, error = std::sqrt(std::max(0.0, squares / n - ratio * ratio) / n);
    const bool of_a_policy = n >= static_cast<double>(kEnough) && std::abs(ratio - 1) <= 3 * error && error < 0.2;
    const bool some = failing.size() < rows_.size();
    const std::string numbers = text_of("; over ", n, " tokens KL(recorded || model) is ", kl / n,
                                        " and the mean ratio ", ratio, " +- ", error);
    findings_.push_back(
        {of_a_policy || some ? Fault::stale_policy : Fault::unexplained_logprobs,
         of_a_policy && some ? Sure::certain
         : of_a_policy       ? Sure::likely
                             : Sure::possible,
         dump_rows(replayed_, failing),
         text_of(series_.name, of_a_policy || some ? " are of other weights than the model's" : " are not the model's",
                 some ? ", while those of the other rows are its own" : "", numbers)});
  }

  static constexpr std::int64_t kEnough = 20;  // tokens

  const Replayed& replayed_;
  const SeriesName& series_;
  std::vector<Row> rows_;
  std::vector<Explanation> explanations_;
  std::vector<Finding> findings_;
  double noise_ = 0;
};

}  // namespace

std::vector<double> usual_temperatures() {
  std::vector<double> out;
  for (int twentieths = 2; twentieths <= 40; ++twentieths) out.push_back(twentieths / 20.0);
  return out;
}

std::vector<Finding> logprob_faults(const Replayed& replayed) {
  std::vector<Finding> out;
  for (const SeriesName& series : {SeriesName{"rollout_logprobs", &Rollout::rollout_logprobs},
                                   SeriesName{"old_logprobs", &Rollout::old_logprobs}}) {
    for (Finding& finding : SeriesJudge(replayed, series).judge()) out.push_back(std::move(finding));
  }
  return out;
}

std::vector<Finding> greedy_rows(const Replayed& replayed) {
  const double unlikely = std::log(1e-6 / static_cast<double>(std::max<std::size_t>(1, replayed.rollouts.size())));
  std::vector<std::int64_t> rows;
  std::size_t judged = 0;
  for (std::size_t i = 0; i < replayed.rollouts.size(); ++i) {
    double probability = 0;
    bool greedy = true;
    std::int64_t tokens = 0;
    for (std::size_t t = 0; t < replayed.probe[i].size(); ++t) {
      if (replayed.rollouts[i].loss_mask[t] == 0) continue;
      const TokenProbe &token = replayed.probe[i][t], &other = replayed.rounded[i][t];
      const double rounding = std::abs(other.full_logprob - token.full_logprob);
      greedy = greedy && token.full_logprob >= token.greatest - 2 * rounding - 1e-6;
      probability += token.greatest, ++tokens;
    }
    if (tokens == 0) continue;
    ++judged;
    if (greedy && probability < unlikely) rows.push_back(replayed.rollouts[i].index);
  }
  if (rows.empty() || rows.size() == judged) return {};
  std::ranges::sort(rows);
  return {{Fault::evaluation_rows, Sure::certain, rows,
           text_of(rows.size(), " of ", judged,
                   " replayed rows have the most likely token throughout, the others do not: "
                   "they were decoded greedily, as an evaluation is")}};
}

}  // namespace espalier
