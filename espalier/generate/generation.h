// One call of generate() (generate/sampler.h): responses run on the machine of decoding.h. Its parts: sampler.cpp adds
// them and takes what ended, generation_ranks.cpp shares the work over ranks, generation_turns.cpp takes what an
// environment answers.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <memory>
#include <utility>

#include "espalier/base/json.h"
#include "espalier/base/random.h"
#include "espalier/generate/decoding.h"
#include "espalier/generate/sampler.h"
#include "espalier/metrics/timer.h"
#include "espalier/plan/dealing.h"
#include "espalier/rollout/json_text.h"
#include "espalier/rollout/kept_sets.h"

namespace espalier::generation {

// A distinct prompt and every response to it.
struct PromptState {
  std::span<const std::int32_t> ids;
  std::string where;
  std::int64_t dp_rank = -1;            // as Prompt has it
  std::vector<std::int64_t> responses;  // indices into the results
  std::int64_t longest = 0;             // tokens of a response

  std::int64_t prompt_rows() const { return static_cast<std::int64_t>(ids.size()); }
};

// The reason why a response ended.
enum class Finish : std::int64_t { none, stop, length, done, turns, abort };
inline constexpr std::array<const char*, 6> kFinishTexts = {"",         "\"stop\"",  "\"length\"",
                                                            "\"done\"", "\"turns\"", "\"abort\""};
inline constexpr const char* kRendered = "\"render\"";  // of a record: its history was rendered again

struct Response {
  Random random;
  std::int64_t limit = 0;             // tokens of prompt and response
  std::string where = {};             // the prompt's, for messages
  std::int64_t number = -1;           // the machine's; -1: it is not there, or not any more
  std::int64_t turn_begin = 0;        // the first token of the turn
  std::int64_t turns = 0;             // that have ended
  std::int64_t first_turn = 0;        // of the record
  std::int64_t rendered = 0;          // first tokens of the result's response that belong to the record's prompt
  std::vector<Rollout> earlier = {};  // records
  Finish finish = Finish::none;
};

class Generation {
 public:
  Generation(const Decoder& decoder, std::span<const Prompt> prompts, const SamplingSettings& settings, Arena& arena,
             Progress& progress);
  Generated run();

 private:
  void make_prompts(std::span<const Prompt> prompts);
  void make_results(std::span<const Prompt> prompts);
  void keep_own_prompts();
  void add_to_machine();
  void gather_results();
  void gather_ends();
  void gather_report();
  bool somebody_runs(bool own);
  void show_progress();
  DecodingRules rules_of(const Response& response, const PromptState& state) const;
  void take_series(std::int64_t response);
  void settle(std::int64_t response);
  void end_turn(std::int64_t response);
  void finish(std::int64_t response, Finish reason);
  void exchange_turns();
  void take_up(std::int64_t response, const NextTurn& next);
  void observe(std::int64_t response, std::span<const std::int32_t> ids);
  void take_history(std::int64_t response, std::span<const std::int32_t> history);
  void move_to(std::int64_t response, std::span<const std::int32_t> history);
  Rollout record_of(std::int64_t response) const;
  std::vector<std::vector<Rollout>> all_records();
  void cut_unfinished();
  Response& response(std::int64_t index) { return responses_[static_cast<std::size_t>(index)]; }
  Rollout& result(std::int64_t index) { return results_[static_cast<std::size_t>(index)]; }

  const Decoder& decoder_;
  const SamplingSettings& settings_;
  const ChoiceRule rule_;
  const bool keeps_sets_;
  Arena& arena_;
  Progress& progress_;
  Decoding decoding_;

  std::vector<std::unique_ptr<PromptState>> prompts_;
  std::vector<Response> responses_;
  std::vector<Rollout> results_;
  std::vector<std::uint8_t> own_;                    // of results: decoded by this rank
  std::map<std::int64_t, std::int64_t> of_machine_;  // indices of responses by the machine's numbers
  std::vector<EndedTurn> ended_;                     // turns to ask about
  std::vector<std::int64_t> asked_;                  // responses whose turns are being asked about
  std::int64_t asked_at_ = 0;                        // decode steps before
  std::int64_t prompt_rows_ = 0;                     // of all prompts, each once
  std::int64_t done_ = 0;  // of the progress: rows of prompts and tokens of responses, each at its longest
  GenerateReport report_;
  std::optional<ErrorText> failure_;
};

}  // namespace espalier::generation
