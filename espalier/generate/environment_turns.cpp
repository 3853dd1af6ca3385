#include "espalier/generate/environment_turns.h"

#include <map>
#include <numeric>
#include <utility>

#include "espalier/plan/dealing.h"
#include "espalier/rollout/json_text.h"
#include "espalier/services/rollout_text.h"
#include "espalier/services/user_file.h"

namespace espalier {
namespace {

Json carried_of(const Prompt& prompt) { return prompt.carried.empty() ? Json::object() : Json::parse(prompt.carried); }

// The messages with an observation behind what the user said last.
Json joined(Json messages, const Json& observation) {
  if (!observation.is_string()) {
    for (const Json& one : observation.is_array() ? observation : Json::array({observation})) messages.push_back(one);
    return messages;
  }
  Json& last = messages.back();
  if (!last.is_object() || last.value("role", Json()) != "user") {
    messages.push_back({{"role", "user"}, {"content", observation}});
    return messages;
  }
  Json& content = last["content"];
  if (content.is_array())
    content.push_back({{"type", "text"}, {"text", observation}});
  else if (content.is_string())
    content = content.get<std::string>() + "\n" + observation.get<std::string>();
  else
    content = observation;
  return messages;
}

// The rank of dp of each prompt, equal ones on one. `tokens`: of the trajectories of one.
std::vector<std::int64_t> ranks_of_prompts(std::span<const Prompt> prompts, std::int64_t tokens, std::int64_t ranks) {
  std::map<std::vector<std::int32_t>, std::size_t> places;
  std::vector<std::size_t> place_of;
  std::vector<double> weights;
  for (const Prompt& prompt : prompts) {
    place_of.push_back(places.emplace(prompt.ids, places.size()).first->second);
    if (place_of.back() == weights.size()) weights.push_back(static_cast<double>(prompt.ids.size()));
    weights[place_of.back()] += static_cast<double>(tokens);
  }
  const std::vector<std::int64_t> rank_of_place = deal_by_weight(weights, ranks);
  std::vector<std::int64_t> rank_of;
  for (const std::size_t place : place_of) rank_of.push_back(rank_of_place[place]);
  return rank_of;
}

// Gives every rank of the group the answers that `ask` has on rank 0, or its failure.
template <class Ask>
std::vector<Json> answers_of_first(Group& group, const Ask& ask) {
  if (group.size() == 1) return ask();
  Json told;
  if (group.rank() == 0) {
    try {
      told["answers"] = ask();
    } catch (const InputError& error) {
      const ErrorText& text = error.text();
      told["error"] = {text.where, text.expected, text.got, text.remedy};
    }
  }
  told = Json::parse(text_of_rank(group, told.dump(-1, ' ', false, Json::error_handler_t::replace)));
  if (told.contains("error")) {
    const Json& text = told["error"];
    throw InputError({text[0].get<std::string>(), text[1].get<std::string>(), text[2].get<std::string>(),
                      text[3].get<std::string>()});
  }
  return told["answers"].get<std::vector<Json>>();
}

}  // namespace

EnvironmentTurns::EnvironmentTurns(Environment& environment, TurnTexts& texts, const StopStrings* stops,
                                   std::span<const Prompt> prompts, std::int64_t n, std::int64_t longest, bool renders,
                                   const Mesh& mesh)
    : environment_(environment), mesh_(mesh), texts_(texts), stops_(stops), renders_(renders) {
  begin(prompts, n, longest);
}

void EnvironmentTurns::begin(std::span<const Prompt> prompts, std::int64_t n, std::int64_t longest) {
  std::vector<Json> items;
  std::vector<std::span<const std::int32_t>> ids;
  for (const Prompt& prompt : prompts) ids.emplace_back(prompt.ids);
  const std::vector<std::string> read = texts_.read(ids);
  const std::vector<std::int64_t> rank_of = ranks_of_prompts(prompts, n * longest, mesh_.dp.size());
  for (std::size_t p = 0; p < prompts.size(); ++p) {
    Json fields = carried_of(prompts[p]);
    const bool is_chat = fields.contains("messages");
    Json prompt = is_chat ? fields["messages"] : fields.value("prompt", Json(read[p]));
    fields.erase("prompt"), fields.erase("self");
    for (std::int64_t i = 0; i < n; ++i) {
      prompts_.push_back(prompts[p]);
      prompts_.back().dp_rank = rank_of[p];
      if (prompts_.back().group.empty()) prompts_.back().group = std::to_string(p);
      const std::string place = prompts[p].where.empty() ? text_of("prompt ", p + 1) : prompts[p].where;
      if (renders_ && !is_chat)
        throw InputError({place + ": prompt", "a list of messages, for --observations render", "a text",
                          "give messages, or --observations append"});
      states_.push_back({text_of("trajectory ", i + 1, " of ", place),
                         is_chat,
                         is_chat ? template_fields(prompts[p].carried) : "",
                         is_chat ? prompt.dump() : "",
                         {}});
      items.push_back({{"trajectory", items.size()}, {"prompt", prompt}, {"fields", fields}});
    }
  }
  add_first(reset(items));
}

// Returns the answers for all trajectories; the other ranks of dp send theirs.
std::vector<Json> EnvironmentTurns::reset(const std::vector<Json>& items) {
  std::vector<Json> own;
  std::vector<std::size_t> place;
  for (std::size_t i = 0; i < items.size(); ++i)
    if (is_own(prompts_[i])) own.push_back(items[i]), place.push_back(i);
  const auto about = [&](std::size_t i) { return "for " + states_[place[i]].where; };
  const std::vector<Json> answers =
      answers_of_first(mesh_.tp, [&] { return own.empty() ? std::vector<Json>() : environment_.reset(own, about); });
  if (mesh_.dp.size() == 1) return answers;
  const std::string told = Json(answers).dump();
  std::vector<std::vector<Json>> by_rank;
  for (int rank = 0; rank < mesh_.dp.size(); ++rank)
    by_rank.push_back(Json::parse(text_of_rank(mesh_.dp, told, rank)).get<std::vector<Json>>());
  std::vector<Json> all;
  std::vector<std::size_t> next(by_rank.size());
  for (const Prompt& prompt : prompts_) {
    const auto rank = static_cast<std::size_t>(prompt.dp_rank);
    all.push_back(by_rank[rank][next[rank]++]);
  }
  return all;
}

// Adds the answers of reset to the prompts.
void EnvironmentTurns::add_first(const std::vector<Json>& answers) {
  std::vector<std::size_t> plain, chat;
  std::vector<Observation> observations;
  std::vector<std::string> messages, chats;
  for (std::size_t i = 0; i < answers.size(); ++i) {
    const Json& observation = answers[i]["observation"];
    if (observation.is_null()) continue;
    if (states_[i].is_chat) {
      chat.push_back(i);
      messages.push_back(joined(carried_of(prompts_[i])["messages"], observation).dump());
      chats.push_back(chat_of(messages.back(), states_[i].template_fields));
    } else {
      plain.push_back(i);
      observations.push_back({observation.dump(), false, prompts_[i].ids.back(), ""});
    }
  }
  const auto ids = texts_.observations(observations, [&](std::size_t i) { return states_[plain[i]].where; });
  for (std::size_t i = 0; i < plain.size(); ++i) {
    Prompt& prompt = prompts_[plain[i]];
    Json carried = carried_of(prompt);
    if (carried.contains("prompt") && carried["prompt"].is_string())
      carried["prompt"] = carried["prompt"].get<std::string>() + answers[plain[i]]["observation"].get<std::string>();
    prompt.carried = carried.dump();
    prompt.ids.insert(prompt.ids.end(), ids[i].begin(), ids[i].end());
    prompt.observed = static_cast<std::int64_t>(ids[i].size());
  }
  const auto encoded = texts_.prompts(chats, [&](std::size_t i) { return states_[chat[i]].where; });
  for (std::size_t i = 0; i < chat.size(); ++i) {
    Prompt& prompt = prompts_[chat[i]];
    Json carried = carried_of(prompt);
    carried["messages"] = Json::parse(messages[i]), carried["prompt"] = encoded[i].text;
    prompt.carried = carried.dump();
    states_[chat[i]].messages = messages[i];
    prompt.observed = std::max<std::int64_t>(
        0, static_cast<std::int64_t>(encoded[i].ids.size()) - static_cast<std::int64_t>(prompt.ids.size()));
    prompt.ids = encoded[i].ids;
  }
}

void EnvironmentTurns::ask(std::vector<EndedTurn> turns) {
  asked_ = std::move(turns);
  std::vector<std::span<const std::int32_t>> ids;
  for (const EndedTurn& turn : asked_) ids.emplace_back(turn.ids);
  said_ = texts_.read(ids);
  cut_.assign(said_.size(), 0);
  std::vector<Json> items;
  for (std::size_t i = 0; i < asked_.size(); ++i) {
    const std::size_t whole = said_[i].size();
    if (stops_) said_[i] = stops_->before(said_[i]);
    cut_[i] = said_[i].size() < whole;
    items.push_back({{"trajectory", asked_[i].response}, {"text", said_[i]}, {"last", asked_[i].last}});
  }
  if (mesh_.tp.rank() > 0) return;
  answers_ = std::async(std::launch::async, [this, items = std::move(items)] {
    return environment_.step(items, [&](std::size_t i) {
      const State& state = states_[static_cast<std::size_t>(asked_[i].response)];
      return text_of("for turn ", state.rewards.size() + 1, " of ", state.where, ": ", quoted_start(said_[i]));
    });
  });
}

std::vector<NextTurn> EnvironmentTurns::answers() {
  const std::vector<Json> answers = answers_of_first(mesh_.tp, [&] { return answers_.get(); });
  std::vector<NextTurn> out(answers.size());
  std::vector<std::size_t> observed;
  for (std::size_t i = 0; i < answers.size(); ++i) {
    State& state = states_[static_cast<std::size_t>(asked_[i].response)];
    state.rewards.push_back(answers[i]["reward"].get<double>());
    out[i].done = answers[i]["done"].get<bool>();
    const Json& observation = answers[i]["observation"];
    if (out[i].done || asked_[i].last || observation.is_null()) continue;
    observed.push_back(i);
  }
  renders_ ? render(answers, observed, out) : append(answers, observed, out);
  return out;
}

void EnvironmentTurns::append(const std::vector<Json>& answers, std::span<const std::size_t> observed,
                              std::vector<NextTurn>& out) {
  std::vector<Observation> observations;
  const auto state_of = [&](std::size_t i) -> State& {
    return states_[static_cast<std::size_t>(asked_[observed[i]].response)];
  };
  for (std::size_t i = 0; i < observed.size(); ++i)
    observations.push_back({answers[observed[i]]["observation"].dump(), state_of(i).is_chat,
                            asked_[observed[i]].ids.back(), state_of(i).template_fields});
  auto ids = texts_.observations(observations, [&](std::size_t i) { return state_of(i).where; });
  for (std::size_t i = 0; i < observed.size(); ++i) out[observed[i]].observation_ids = std::move(ids[i]);
}

void EnvironmentTurns::render(const std::vector<Json>& answers, std::span<const std::size_t> observed,
                              std::vector<NextTurn>& out) {
  std::vector<RenderedTurn> turns;
  const auto state_of = [&](std::size_t i) -> State& {
    return states_[static_cast<std::size_t>(asked_[observed[i]].response)];
  };
  for (std::size_t i = 0; i < observed.size(); ++i) {
    const std::size_t turn = observed[i];
    turns.push_back({state_of(i).messages, asked_[turn].ids,
                     cut_[turn] != 0 ? std::optional(said_[turn]) : std::nullopt, answers[turn]["observation"].dump(),
                     state_of(i).template_fields});
  }
  std::vector<RenderedChat> chats = texts_.rendered(turns, [&](std::size_t i) { return state_of(i).where; });
  for (std::size_t i = 0; i < observed.size(); ++i) {
    state_of(i).messages = std::move(chats[i].messages);
    out[observed[i]].history = std::move(chats[i].ids);
  }
}

// Gets the rewards of the turns that other ranks of dp played.
void EnvironmentTurns::gather_rewards() {
  if (mesh_.dp.size() == 1) return;
  std::vector<std::int64_t> turns;
  for (const State& state : states_) turns.push_back(std::ssize(state.rewards));
  add_over_ranks(mesh_.dp, turns);
  std::vector<double> rewards;
  for (std::size_t i = 0; i < states_.size(); ++i) {
    states_[i].rewards.resize(static_cast<std::size_t>(turns[i]));
    rewards.insert(rewards.end(), states_[i].rewards.begin(), states_[i].rewards.end());
  }
  rewards = sums_over_ranks(mesh_.dp, std::move(rewards));  // the others add 0
  auto next = rewards.begin();
  for (State& state : states_) {
    const auto end = next + std::ssize(state.rewards);
    state.rewards.assign(next, end), next = end;
  }
}

void EnvironmentTurns::add_to(Generated& generated) {
  std::vector<Rollout>& rollouts = generated.rollouts;
  gather_rewards();
  std::vector<std::span<const std::int32_t>> ids;
  for (const Rollout& rollout : rollouts) ids.emplace_back(rollout.response_ids);
  const std::vector<std::string> texts = texts_.read(ids);
  for (std::size_t i = 0; i < rollouts.size(); ++i) {
    const bool last = i + 1 == rollouts.size() || generated.trajectory[i + 1] != generated.trajectory[i];
    std::size_t end = i;  // the trajectory's last record
    while (end + 1 < rollouts.size() && generated.trajectory[end + 1] == generated.trajectory[i]) ++end;
    const std::vector<double>& all = states_[static_cast<std::size_t>(generated.trajectory[i])].rewards;
    const auto first = rollouts[i].turn.value_or(0), behind = last ? std::ssize(all) : *rollouts[i + 1].turn;
    const std::vector<double> own(all.begin() + first, all.begin() + behind);
    std::string& carried = rollouts[i].carried;
    if (carried_fields(rollouts[end]).value("finish_reason", "") != "abort")
      rollouts[i].reward = std::accumulate(all.begin(), all.end(), 0.0);
    add_carried(carried, "turns", std::to_string(own.size()));
    add_carried(carried, "turn_rewards", Json(own).dump());
    carry_text(carried, "response", texts[i]);
  }
}

Generated generate_trajectories(const Decoder& decoder, std::span<const Prompt> prompts, SamplingSettings settings,
                                Environment& environment, TurnTexts& texts, Arena& arena, Progress& progress) {
  EnvironmentTurns trajectories(environment, texts, settings.stops, prompts, std::exchange(settings.n, 1),
                                settings.max_response_length, settings.renders, decoder.mesh());
  settings.turns = &trajectories;
  Generated out = generate(decoder, trajectories.prompts(), settings, arena, progress);
  trajectories.add_to(out);
  out.report.prompts = static_cast<std::int64_t>(prompts.size());
  return out;
}

}  // namespace espalier
