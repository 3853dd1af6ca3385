#include "espalier/services/reward_function.h"

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "espalier/base/json.h"
#include "espalier/rollout/json_text.h"
#include "espalier/services/rollout_text.h"
#include "espalier/services/user_file.h"

namespace espalier {
namespace {

constexpr const char* kSignature = "compute_score(data_source, solution_str, ground_truth, extra_info)";

// One response as the service is told of it.
Json item_of(const Rollout& rollout, bool with_ids) {
  const Json carried = carried_fields(rollout);
  const auto member = [](const Json& object, const char* name) {
    return object.is_object() && object.contains(name) ? object[name] : Json();
  };
  Json truth = member(carried, "ground_truth");
  if (truth.is_null()) truth = member(member(carried, "reward_model"), "ground_truth");
  Json info = member(carried, "extra_info");
  if (!info.is_object()) info = Json::object();
  const Json own{{"prompt", member(carried, "prompt")},
                 {"ended", carried.value("finish_reason", "") == "stop"},
                 {"tokens", rollout.response_ids.size()}};
  for (const auto& [name, value] : own.items())
    if (!info.contains(name)) info[name] = value;
  Json out{{"data_source", member(carried, "data_source")},
           {"solution_str", member(carried, "response")},
           {"ground_truth", truth},
           {"extra_info", info},
           {"prompt", member(carried, "prompt")},
           {"messages", member(carried, "messages")}};
  if (with_ids) out["response_ids"] = rollout.response_ids;
  return out;
}

Score score_of(const Json& answer) {
  Score out;
  if (!answer["score"].is_null()) out.score = answer["score"].get<double>();
  if (!answer["accuracy"].is_null()) out.accuracy = answer["accuracy"].get<double>();
  if (answer["extra"].is_object()) out.extra = answer["extra"].dump();
  return out;
}

}  // namespace

RewardFunction::RewardFunction(const std::string& file, double timeout)
    : file_(existing_user_file(file, "compute_score", "--reward")),
      service_("reward", file, milliseconds(timeout),
               [this](const Json& error, std::size_t place) { fail(error, place); }) {}

// "for the response of prompts.jsonl:3: 'teal ...'"
std::string RewardFunction::about(std::size_t place) const {
  if (place == PythonService::kNoPlace) return "";
  if (service_.ready()["form"] != "single") return text_of("for ", asked_.size() - place, " responses at once");
  const Rollout& rollout = asked_[place];
  const std::string text = carried_fields(rollout).value("response", "");
  return "for a response to " + rollout.where + ": " + quoted_start(text);
}

void RewardFunction::fail(const Json& error, std::size_t place) const {
  const std::string kind = error["kind"], message = error["message"];
  if (kind == "missing")
    throw InputError({file_, std::string("a function ") + kSignature, message, "name it compute_score"});
  fail_if_unusable(error, file_, "the reward function");
  if (kind == "number")
    throw InputError(
        {file_,
         "compute_score to return a number, a dict with a number under 'score', or None for a response that it "
         "does not judge",
         message, about(place)});
  throw InputError({line_of(error, file_), "compute_score to return a number", message, about(place)});
}

std::vector<Score> RewardFunction::of(std::span<const Rollout> rollouts, Progress& progress) {
  asked_ = rollouts;
  std::vector<Score> out;
  const bool with_ids = service_.ready()["form"] == "trl";
  const auto request_from = [&](std::size_t first) {
    std::string request = "{\"score\": [";
    for (const Rollout& rollout : rollouts.subspan(first))
      request.append(&rollout == &rollouts[first] ? "" : ", ")
          .append(item_of(rollout, with_ids).dump(-1, ' ', false, Json::error_handler_t::replace));
    return request + "]}";
  };
  progress.begin("rewards", static_cast<std::int64_t>(rollouts.size()), "responses");
  try {
    service_.ask_each(rollouts.size(), request_from, [&](std::size_t, const Json& answer) {
      out.push_back(score_of(answer));
      progress.advance_to(static_cast<std::int64_t>(out.size()));
    });
  } catch (const PythonEnded& end) {
    throw InputError({end.text().where, end.text().expected, end.text().got + ", twice", about(out.size())});
  } catch (const PythonLate& late) {
    throw InputError({late.text().where, "compute_score to return in time", late.text().got,
                      "raise --reward-timeout; it was called " + about(out.size())});
  }
  progress.end();
  return out;
}

std::optional<double> mean_score(std::span<const Score> scores) {
  double sum = 0, judged = 0;
  for (const Score& score : scores)
    if (score.score) sum += *score.score, judged += 1;
  return judged > 0 ? std::optional(sum / judged) : std::nullopt;
}

std::string unjudged_note(std::int64_t unjudged, std::int64_t responses) {
  if (unjudged == 0) return "";
  return text_of(
      unjudged, " of ", responses,
      " responses were not judged (compute_score returned None): they have no reward, and training gives them "
      "advantage 0 and no part in their group's statistics");
}

void add_scores(std::vector<Rollout>& rollouts, std::span<const Score> scores) {
  ESPALIER_INTERNAL_EQ(rollouts.size(), scores.size());
  for (std::size_t i = 0; i < scores.size(); ++i) {
    rollouts[i].reward = scores[i].score;
    if (!scores[i].extra.empty()) add_carried(rollouts[i].carried, "reward_extra_info", scores[i].extra);
  }
}

}  // namespace espalier
