// The trajectories of one sampling: an environment begins prompts, answers turns and gives rewards, which are summed.
#pragma once

#include <future>
#include <span>
#include <string>
#include <vector>

#include "espalier/generate/sampler.h"
#include "espalier/generate/turn_texts.h"
#include "espalier/parallel/mesh.h"
#include "espalier/services/environment.h"

namespace espalier {

class EnvironmentTurns final : public Turns {
 public:
  // Begins n trajectories of each prompt. Each is a separate prompt in prompts(), to be sampled with n = 1, and ends
  // with the observation of reset (in the user's last message if the prompt is a list of messages). `stops` may be
  // null. A rank of dp plays the trajectories of its prompts, `longest` tokens each, and sends reset's observations
  // to the others; among ranks of tp only the first asks the environment. Errors: as Environment and
  // TurnTexts.
  // With `renders`, observations are histories (NextTurn), and every prompt is a list of messages.
  EnvironmentTurns(Environment& environment, TurnTexts& texts, const StopStrings* stops,
                   std::span<const Prompt> prompts, std::int64_t n, std::int64_t longest, bool renders,
                   const Mesh& mesh);

  const std::vector<Prompt>& prompts() const { return prompts_; }

  // The environment is called on a separate thread. Errors: as Environment and TurnTexts.
  void ask(std::vector<EndedTurn> turns) override;
  std::vector<NextTurn> answers() override;

  // Adds to each record of the trajectory of prompts()[i]: `reward`, the sum of the trajectory's rewards, if it ended;
  // and the carried fields `turns`, `turn_rewards` and `response`, of the record's own turns. Every rank calls it.
  void add_to(Generated& generated);

 private:
  struct State {
    std::string where;                      // "trajectory 2 of prompts.jsonl:3"
    bool is_chat = false;                   // the prompt is a list of messages
    std::string template_fields, messages;  // JSON texts of a chat
    std::vector<double> rewards;
  };

  void begin(std::span<const Prompt> prompts, std::int64_t n, std::int64_t longest);
  void append(const std::vector<Json>& answers, std::span<const std::size_t> observed, std::vector<NextTurn>& out);
  void render(const std::vector<Json>& answers, std::span<const std::size_t> observed, std::vector<NextTurn>& out);
  std::vector<Json> reset(const std::vector<Json>& items);
  void add_first(const std::vector<Json>& answers);
  void gather_rewards();
  bool is_own(const Prompt& prompt) const { return prompt.dp_rank == mesh_.dp.rank(); }

  Environment& environment_;
  const Mesh& mesh_;
  TurnTexts& texts_;
  const StopStrings* stops_;
  bool renders_;
  std::vector<Prompt> prompts_;
  std::vector<State> states_;  // of prompts_
  std::vector<EndedTurn> asked_;
  std::vector<std::string> said_;  // the texts of asked_
  std::vector<std::uint8_t> cut_;  // whether a stop text ended them
  std::future<std::vector<Json>> answers_;
};

// Samples n = settings.n trajectories of each prompt, of settings.most_turns turns at most. The report counts prompts
// as they were given. The decoder's tables must cover positions_needed() of the prompts.
Generated generate_trajectories(const Decoder& decoder, std::span<const Prompt> prompts, SamplingSettings settings,
                                Environment& environment, TurnTexts& texts, Arena& arena, Progress& progress);

}  // namespace espalier
