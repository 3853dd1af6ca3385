// The neutral record: one response a line, fields in any order.
#include <algorithm>
#include <numeric>
#include <utility>

#include "espalier/rollout/json_text.h"
#include "espalier/rollout/kept_sets_field.h"
#include "espalier/rollout/record_data.h"
#include "espalier/rollout/record_format.h"
#include "espalier/rollout/recorded_experts_field.h"
#include "espalier/rollout/settled_series.h"

namespace espalier {
namespace {

// Fields that are read here; the others have rows (record_data.h) or are carried through.
constexpr std::string_view kOwnFields[] = {
    "prompt_ids",       "response_ids",       "loss_mask",  "reward",       "advantage",       "routed_experts",
    "kept_ids",         "temperature",        "chosen_ids", "rejected_ids", "chosen_kept_ids", "rejected_kept_ids",
    "ref_chosen_logps", "ref_rejected_logps", "margin",     "answers"};

// Carried through without a use: logprobs and entropies are what score writes, the rest is for those who read or reward
// what the tokens say.
constexpr std::string_view kCarriedFields[] = {"id",
                                               "meta",
                                               "finish_reason",
                                               "logprobs",
                                               "entropies",
                                               "prompt",
                                               "messages",
                                               "response",
                                               "data_source",
                                               "ground_truth",
                                               "extra_info",
                                               "ability",
                                               "reward_model",
                                               "reward_extra_info",
                                               "turns",
                                               "turn_rewards",
                                               "tools",
                                               "chat_template_kwargs"};

// The answers of a pair, their kept sets and log-probs under the reference: the chosen one, then the rejected.
struct Answers {
  std::vector<std::int32_t> ids[2];
  KeptIds kept[2];
  std::optional<double> ref_logprob[2];
  bool seen[2] = {};
  std::optional<double> margin;
};
constexpr std::string_view kAnswerIds[2] = {"chosen_ids", "rejected_ids"},
                           kAnswerKept[2] = {"chosen_kept_ids", "rejected_kept_ids"},
                           kAnswerReferences[2] = {"ref_chosen_logps", "ref_rejected_logps"};

// The place of a name among the two; -1: it is none of them.
int place_of(std::string_view name, const std::string_view (&names)[2]) {
  return name == names[0] ? 0 : name == names[1] ? 1 : -1;
}

// An answer of a list.
struct ScoredAnswer {
  std::vector<std::int32_t> ids;
  double score = 0;
};

struct Seen {
  bool prompt = false, text = false, response = false, mask = false;  // text: of the prompt
  std::vector<const SeriesRow*> series;
  std::optional<double> scalar_advantage;
  bool token_advantages = false;
  KeptIds kept;
};

void check_length(std::size_t have, const Rollout& rollout, const RecordPlace& place, std::string_view field) {
  if (have != rollout.response_ids.size())
    throw place.wrong(field, text_of(rollout.response_ids.size(), " entries, one per response token"), text_of(have));
}

void check_record(Rollout& rollout, Seen&& seen, const RecordPlace& place, std::string_view kept_field = "kept_ids") {
  const bool asks = (seen.prompt || seen.text) && !seen.response;
  const char* const remedy =
      asks ? "A record without a response is a prompt: espalier generate --prompts FILE makes rollouts of it" : "";
  if (!seen.prompt) throw place.wrong("prompt_ids", "this field in every record", "none", remedy);
  if (rollout.prompt_ids.empty()) throw place.wrong("prompt_ids", "at least one token", "an empty list");
  if (!seen.response) throw place.wrong("response_ids", "this field in every record (it may be empty)", "none", remedy);
  constexpr std::size_t kLongest = (std::size_t{1} << 31) - 1;  // depths are 32-bit
  if (rollout.prompt_ids.size() + rollout.response_ids.size() > kLongest)
    throw place.wrong("response_ids", "fewer than 2^31 tokens in all", "more");
  const std::int32_t recorded = rollout.recorded_experts.tokens, tokens = rollout.length();
  if (recorded > 0 && recorded != tokens && recorded != tokens - 1)
    throw place.wrong("routed_experts",
                      text_of(tokens, " or ", tokens - 1, " entries, one per token of prompt and response"),
                      text_of(recorded));
  if (rollout.turn && rollout.trajectory.empty())
    throw place.wrong("turn", "a field trajectory in the same record", "none");
  if (!rollout.branch.empty() && rollout.trajectory.empty())
    throw place.wrong("branch", "a field trajectory in the same record", "none",
                      "Give all branches of one run the same trajectory");
  if (seen.mask)
    check_length(rollout.loss_mask.size(), rollout, place, "loss_mask");
  else
    rollout.loss_mask.assign(rollout.response_ids.size(), 1);
  for (const SeriesRow* series : seen.series)
    check_length((rollout.*series->values).size(), rollout, place, series->name);
  if (!rollout.token_rewards.empty()) check_length(rollout.token_rewards.size(), rollout, place, "reward");
  if (seen.token_advantages) check_length(rollout.advantages.size(), rollout, place, "advantage");
  if (seen.scalar_advantage) rollout.advantages.assign(rollout.response_ids.size(), *seen.scalar_advantage);
  give_kept_sets(std::move(seen.kept), place, kept_field, rollout);
  settle_series(rollout.advantages, rollout.loss_mask, {place, "advantage"});
  for (const SeriesRow& series : series_rows())
    if (series.kind != SeriesKind::sampled)
      settle_series(rollout.*series.values, rollout.loss_mask, {place, series.name});
}

// The fields of one response have no meaning beside several; `fields` names the several.
void refuse_fields_of_one(const Rollout& common, const Seen& seen, std::string_view fields, const RecordPlace& place) {
  const auto refuse = [&](bool given, std::string_view field) {
    if (given) throw place.wrong(field, text_of("no such field together with ", fields), "one", "");
  };
  refuse(seen.response, "response_ids");
  refuse(seen.mask, "loss_mask");
  refuse(common.reward.has_value(), "reward");
  refuse(seen.scalar_advantage || seen.token_advantages, "advantage");
  refuse(common.recorded_experts.tokens > 0, "routed_experts");
  refuse(!seen.kept.sets.begin.empty(), "kept_ids");
  if (!seen.series.empty()) refuse(true, seen.series.front()->name);
}

// One of several answers; `common` holds the other fields of the record.
void add_answer(const Rollout& common, Seen seen, std::vector<std::int32_t>&& ids, const PairPlace& pair,
                const RecordPlace& place, std::vector<Rollout>& out, std::string_view kept_field = "kept_ids") {
  Rollout answer = common;
  answer.response_ids = std::move(ids);
  answer.pair = pair;
  seen.response = true;
  check_record(answer, std::move(seen), place, kept_field);
  out.push_back(std::move(answer));
}

void add_pair(const Rollout& common, const Seen& seen, Answers&& answers, RecordReader& reader,
              const RecordPlace& place, std::vector<Rollout>& out) {
  refuse_fields_of_one(common, seen, "chosen_ids and rejected_ids", place);
  for (int side = 0; side < 2; ++side) {
    if (!answers.seen[side]) throw place.wrong(kAnswerIds[side], "this field in every record of a pair", "none");
    if (answers.ids[side].empty()) throw place.wrong(kAnswerIds[side], "at least one token", "an empty list");
  }
  if (answers.ref_logprob[0].has_value() != answers.ref_logprob[1].has_value())
    throw place.wrong(kAnswerReferences[answers.ref_logprob[0] ? 1 : 0], "this field for both answers", "none");
  for (int side = 0; side < 2; ++side) {
    const PairPlace pair{reader.pairs, side == 0, answers.ref_logprob[side], {}, answers.margin.value_or(0)};
    Seen of_side = seen;
    of_side.kept = std::move(answers.kept[side]);
    add_answer(common, std::move(of_side), std::move(answers.ids[side]), pair, place, out, kAnswerKept[side]);
  }
  ++reader.pairs;
}

void add_list(const Rollout& common, const Seen& seen, std::vector<ScoredAnswer>&& answers, RecordReader& reader,
              const RecordPlace& place, std::vector<Rollout>& out) {
  refuse_fields_of_one(common, seen, "answers", place);
  if (answers.size() < 2) throw place.wrong("answers", "at least two answers to compare", text_of(answers.size()));
  for (ScoredAnswer& answer : answers)
    add_answer(common, seen, std::move(answer.ids), {reader.pairs, false, {}, answer.score, 0}, place, out);
  ++reader.pairs;
}

// A number, or one per response token, whose sum is the reward.
void read_reward(JsonValue value, const RecordPlace& place, std::string_view field, Rollout& out) {
  if (!is_list(value)) {
    out.reward = read_number(value, place, field);
    return;
  }
  read_numbers(value, place, field, ListShape::flat, out.token_rewards);
  out.reward = std::accumulate(out.token_rewards.begin(), out.token_rewards.end(), 0.0);
}

// The words of a choice that a record may have: all that are not for options alone.
template <class Choice>
Choice read_word(JsonValue value, const RecordPlace& place, std::string_view field) {
  const std::string text = read_scalar_text(value, place, field);
  const auto words = words_of(Choice{});
  std::string expected;
  for (std::size_t i = 0; i < words.size(); ++i) {
    const std::string word = text_of('"', words[i], '"');
    if (words[i] == std::string_view("auto")) continue;
    if (text == word) return static_cast<Choice>(i);
    expected += (expected.empty() ? "" : " or ") + word;
  }
  throw place.wrong(field, expected, text);
}

double read_amount(JsonValue value, const RecordPlace& place, std::string_view field) {
  const double amount = read_number(value, place, field);
  if (!(amount >= 0)) throw place.wrong(field, "a number of at least 0", text_of(amount));
  return amount;
}

void read_scalar(const ScalarRow& row, JsonValue value, const RecordPlace& place, Rollout& out) {
  const auto read = [&]<class T>(T Rollout::*member) {
    if constexpr (std::is_same_v<T, std::string>)
      out.*member = read_scalar_text(value, place, row.name);
    else if constexpr (std::is_same_v<T, std::optional<std::int64_t>>)
      out.*member = read_integer(value, place, row.name);
    else if constexpr (std::is_same_v<T, std::optional<double>>)
      out.*member = read_amount(value, place, row.name);
    else
      out.*member = read_word<typename T::value_type>(value, place, row.name);
  };
  std::visit(read, row.value);
}

std::vector<ScoredAnswer> read_answers(JsonValue value, const RecordPlace& place, std::int64_t vocabulary) {
  constexpr const char* kExpected = "a list of objects with response_ids and score";
  simdjson::ondemand::array list;
  if (value.get_array().get(list)) throw place.wrong("answers", kExpected, "another JSON value");
  std::vector<ScoredAnswer> answers;
  for (auto element : list) {
    const std::string at = text_of("answers[", answers.size(), "]");
    ScoredAnswer& answer = answers.emplace_back();
    simdjson::ondemand::object object;
    if (element.get_object().get(object)) throw place.wrong(at, kExpected, "another JSON value");
    bool scored = false;
    for (auto member : object) {
      std::string_view key;
      JsonValue field;
      if (member.unescaped_key().get(key) || member.value().get(field))
        throw place.wrong(at, kExpected, "an object with invalid JSON");
      const std::string name = text_of(at, ".", key);
      if (key == "response_ids") {
        read_token_ids(field, place, name, vocabulary, ListShape::flat, answer.ids);
      } else if (key == "score") {
        answer.score = read_number(field, place, name);
        scored = true;
      } else {
        throw place.wrong(name, "only response_ids and score in an answer", "another field");
      }
    }
    if (answer.ids.empty()) throw place.wrong(at + ".response_ids", "at least one token", "none");
    if (!scored) throw place.wrong(at + ".score", "a number in every answer", "none");
  }
  return answers;
}

}  // namespace

std::span<const std::string_view> neutral_fields() {
  static const std::vector<std::string_view> fields = [] {
    std::vector<std::string_view> out(std::begin(kOwnFields), std::end(kOwnFields));
    for (const ScalarRow& row : scalar_rows()) out.push_back(row.name);
    for (const SeriesRow& row : series_rows()) out.push_back(row.name);
    out.insert(out.end(), std::begin(kCarriedFields), std::end(kCarriedFields));
    return out;
  }();
  return fields;
}

void read_neutral_record(RecordReader& reader, std::string_view line, const RecordPlace& place,
                         std::vector<Rollout>& out) {
  Rollout rollout;
  Answers answers;
  std::optional<std::vector<ScoredAnswer>> list;
  rollout.temperature = reader.temperature;
  Seen seen;
  constexpr ListShape kFlat = ListShape::flat;
  for_each_member(reader.parser, line, place, [&](std::string_view key, JsonValue value) {
    if (key == "prompt_ids") {
      read_token_ids(value, place, key, reader.vocabulary, kFlat, rollout.prompt_ids);
      seen.prompt = true;
      return;
    }
    if (key == "response_ids") {
      read_token_ids(value, place, key, reader.vocabulary, kFlat, rollout.response_ids);
      seen.response = true;
      return;
    }
    seen.text = seen.text || key == "prompt" || key == "messages";
    if (std::ranges::find(kCarriedFields, key) != std::end(kCarriedFields))
      return add_carried(rollout.carried, key, read_raw(value, place, key));
    const SeriesRow* const series = find_series(key);
    const ScalarRow* const scalar = find_scalar(key);
    if (!series && !scalar && std::ranges::find(kOwnFields, key) == std::end(kOwnFields)) {
      reader.unknown_fields.try_emplace(std::string(key), place.where());
      return add_carried(rollout.carried, key, read_raw(value, place, key));
    }
    if (is_null(value)) return;  // an optional field left open
    if (series) {
      read_series(value, place, key, kFlat, rollout.*series->values);
      seen.series.push_back(series);
    } else if (scalar) {
      read_scalar(*scalar, value, place, rollout);
    } else if (const int side = place_of(key, kAnswerIds); side >= 0) {
      read_token_ids(value, place, key, reader.vocabulary, kFlat, answers.ids[side]);
      answers.seen[side] = true;
    } else if (const int of_kept = place_of(key, kAnswerKept); of_kept >= 0) {
      read_kept_ids(value, place, key, reader.vocabulary, answers.kept[of_kept]);
    } else if (const int reference = place_of(key, kAnswerReferences); reference >= 0) {
      answers.ref_logprob[reference] = read_number(value, place, key);
    } else if (key == "margin") {
      answers.margin = read_number(value, place, key);
    } else if (key == "answers") {
      list = read_answers(value, place, reader.vocabulary);
    } else if (key == "loss_mask") {
      read_mask(value, place, key, kFlat, rollout.loss_mask);
      seen.mask = true;
    } else if (key == "reward") {
      read_reward(value, place, key, rollout);
    } else if (key == "routed_experts") {
      read_recorded_experts(value, place, key, rollout.recorded_experts);
    } else if (key == "kept_ids") {
      read_kept_ids(value, place, key, reader.vocabulary, seen.kept);
    } else if (key == "temperature") {
      rollout.temperature = read_number(value, place, key);
      if (!(rollout.temperature > 0)) throw place.wrong(key, "a number above 0", text_of(rollout.temperature));
    } else if (is_list(value)) {
      read_series(value, place, key, kFlat, rollout.advantages);
      seen.token_advantages = true;
    } else {
      seen.scalar_advantage = read_series_value(value, place, key);
    }
  });
  const bool pair = answers.seen[0] || answers.seen[1];
  const bool kept = !answers.kept[0].sets.begin.empty() || !answers.kept[1].sets.begin.empty();
  if (list && (pair || kept || answers.margin || answers.ref_logprob[0] || answers.ref_logprob[1]))
    throw place.wrong("answers", "no fields of a pair in the same record",
                      "chosen_ids, rejected_ids, their kept ids, margin or ref_..._logps");
  if (list) return add_list(rollout, seen, *std::move(list), reader, place, out);
  if (pair) return add_pair(rollout, seen, std::move(answers), reader, place, out);
  if (answers.ref_logprob[0] || answers.ref_logprob[1] || answers.margin)
    throw place.wrong("chosen_ids", "this field together with ref_chosen_logps, ref_rejected_logps or margin", "none");
  for (int side = 0; side < 2; ++side)
    if (!answers.kept[side].sets.begin.empty())
      throw place.wrong(kAnswerIds[side], text_of("this field together with ", kAnswerKept[side]), "none");
  check_record(rollout, std::move(seen), place);
  for (const SeriesRow& series : series_rows()) {
    if (series.kind != SeriesKind::sampled) continue;
    const std::int64_t missing = settle_sampled(rollout.*series.values, rollout.loss_mask);
    if (series.use == DataUse::update) reader.unsampled_tokens += missing;
  }
  out.push_back(std::move(rollout));
}

}  // namespace espalier
