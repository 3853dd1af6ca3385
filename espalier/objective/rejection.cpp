#include "espalier/objective/rejection.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include "espalier/base/error.h"
#include "espalier/objective/loss_sequences.h"
#include "espalier/rollout/record_data.h"

namespace espalier {
namespace {

constexpr const char* kWords =
    "token_k1, token_k2, token_k3, seq_sum_k1, seq_sum_k2, seq_sum_k3, seq_mean_k1, seq_mean_k2, seq_mean_k3, "
    "seq_max_k2, seq_max_k3";

std::vector<std::string> parts_of(const std::string& text, char between) {
  std::vector<std::string> out;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(between, begin), text.size());
    std::string part = text.substr(begin, end - begin);
    part.erase(0, part.find_first_not_of(' '));
    part.erase(part.find_last_not_of(' ') + 1);
    if (!part.empty()) out.push_back(std::move(part));
    begin = end + 1;
  }
  return out;
}

double positive(const std::string& text, const RejectionRule& rule, const std::string& given) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !(value > 0))
    throw OptionError({"--rollout-rs-threshold",
                       rule.divergence == Divergence::k1
                           ? text_of("for ", rule.word, " bounds of the ratio above 0, LOW_HIGH or HIGH alone")
                           : text_of("for ", rule.word, " one upper bound above 0"),
                       '"' + given + '"', ""});
  return value;
}

RejectionRule rule_of(const std::string& word) {
  RejectionRule rule{.word = word};
  const std::size_t cut = word.rfind('_');
  const std::string over = word.substr(0, cut), divergence = cut == std::string::npos ? "" : word.substr(cut + 1);
  const bool known_over = over == "token" || over == "seq_sum" || over == "seq_mean" || over == "seq_max";
  const bool known = divergence == "k1" || divergence == "k2" || divergence == "k3";
  if (!known_over || !known || word == "seq_max_k1")
    throw OptionError({"--rollout-rs", text_of("one of ", kWords, ", or several of them with commas between them"),
                       '"' + word + '"', ""});
  rule.divergence = divergence == "k1" ? Divergence::k1 : divergence == "k2" ? Divergence::k2 : Divergence::k3;
  rule.over = over == "token"      ? DivergenceOver::token
              : over == "seq_sum"  ? DivergenceOver::sum
              : over == "seq_mean" ? DivergenceOver::mean
                                   : DivergenceOver::maximum;
  return rule;
}

void set_threshold(RejectionRule& rule, const std::string& text) {
  const std::vector<std::string> bounds = parts_of(text, '_');
  if (bounds.empty() || bounds.size() > (rule.divergence == Divergence::k1 ? 2u : 1u)) positive("", rule, text);
  rule.high = positive(bounds.back(), rule, text);
  if (rule.divergence != Divergence::k1) return;
  const double low = bounds.size() == 2 ? positive(bounds.front(), rule, text) : 1 / rule.high;
  if (low > rule.high)
    throw OptionError({"--rollout-rs-threshold",
                       text_of("for ", rule.word, " a lower bound that is not above the upper"), text,
                       bounds.size() == 1 ? "a single bound H stands for 1/H and H" : ""});
  rule.low = std::log(low), rule.high = std::log(rule.high);
}

double divergence_of(Divergence divergence, double old, double sampled) {
  constexpr double kBound = 20;  // verl's, whatever --log-ratio-bound is
  const double d = std::clamp(old - sampled, -kBound, kBound);
  switch (divergence) {
    case Divergence::k1:
      return -d;
    case Divergence::k2:
      return 0.5 * d * d;
    case Divergence::k3:
      return std::exp(d) - 1 - d;
  }
  return 0;
}

class Rejection {
 public:
  Rejection(std::span<Rollout> rollouts, const std::vector<std::int32_t>& members) : rollouts_(rollouts) {
    for (const std::int32_t index : members)
      for (std::size_t t = 0; t < at(index).loss_mask.size(); ++t)
        if (at(index).loss_mask[t]) tokens_.push_back({index, t});
    rejected_.resize(tokens_.size());
  }

  void apply(const RejectionRule& rule) {
    double sum = 0, count = 0, maximum = -std::numeric_limits<double>::infinity();
    for (std::size_t k = 0; k < tokens_.size(); ++k) {
      const Rollout& rollout = at(tokens_[k].rollout);
      const std::size_t t = tokens_[k].position;
      const double number =
          divergence_of(rule.divergence, rollout.old_logprobs[t], rollout.sampled_logprob(t, rollout.old_logprobs[t]));
      if (rule.over == DivergenceOver::token) rejected_[k] |= !rule.keeps(number);
      const double share = rollout.loss_share(t);
      sum += share * number, count += share, maximum = std::max(maximum, number);
    }
    if (rule.over == DivergenceOver::token || tokens_.empty()) return;
    const double number = rule.over == DivergenceOver::sum    ? sum
                          : rule.over == DivergenceOver::mean ? sum / count
                                                              : maximum;
    if (!rule.keeps(number)) std::ranges::fill(rejected_, std::uint8_t{1});
  }

  // Masks what was rejected; the number of these tokens.
  std::int64_t settle() {
    for (std::size_t k = 0; k < tokens_.size(); ++k)
      if (rejected_[k]) at(tokens_[k].rollout).silence(tokens_[k].position, Silenced::rejected);
    return std::ranges::count(rejected_, 1);
  }
  std::int64_t tokens() const { return std::ssize(tokens_); }

 private:
  struct Token {
    std::int32_t rollout;
    std::size_t position;
  };
  Rollout& at(std::int32_t index) { return rollouts_[static_cast<std::size_t>(index)]; }

  std::span<Rollout> rollouts_;
  std::vector<Token> tokens_;
  std::vector<std::uint8_t> rejected_;
};

}  // namespace

std::vector<RejectionRule> rejection_rules(const Options& options) {
  std::vector<RejectionRule> rules;
  for (const std::string& word : parts_of(options.rollout_rs, ',')) {
    const auto same = [&](const RejectionRule& rule) { return rule.word == word; };
    if (std::ranges::none_of(rules, same)) rules.push_back(rule_of(word));
  }
  const std::vector<std::string> thresholds = parts_of(options.rollout_rs_threshold, ',');
  if (rules.empty() && !thresholds.empty())
    throw OptionError({"--rollout-rs-threshold", "--rollout-rs with it", options.rollout_rs_threshold,
                       "give --rollout-rs, or leave --rollout-rs-threshold out"});
  if (rules.empty()) return rules;
  if (thresholds.size() != 1 && thresholds.size() != rules.size())
    throw OptionError(
        {"--rollout-rs-threshold",
         text_of("one bound for all words of --rollout-rs, or ", rules.size(), " with commas between them"),
         thresholds.empty() ? "nothing" : options.rollout_rs_threshold, ""});
  for (std::size_t i = 0; i < rules.size(); ++i) set_threshold(rules[i], thresholds[thresholds.size() == 1 ? 0 : i]);
  return rules;
}

std::string reject_tokens(std::span<Rollout> rollouts, const Options& options) {
  const std::vector<RejectionRule> rules = rejection_rules(options);
  if (rules.empty()) return "";
  require_series(rollouts, options);
  std::int64_t tokens = 0, rejected = 0, sequences = 0;
  const LossSequences all = LossSequences::from(options, rollouts);
  for (const auto& members : all.rollouts) {
    Rejection rejection(rollouts, members);
    for (const RejectionRule& rule : rules) rejection.apply(rule);
    const std::int64_t found = rejection.settle();
    tokens += rejection.tokens(), rejected += found, sequences += found > 0;
  }
  return text_of("--rollout-rs ", options.rollout_rs, ": ", rejected, " of ", tokens, " loss tokens rejected, in ",
                 sequences, " of ", std::ssize(all.rollouts), " sequences");
}

}  // namespace espalier
