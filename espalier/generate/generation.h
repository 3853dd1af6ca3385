// One call of generate() (generate/sampler.h): prompts are admitted while their keys and values fit, and every decode
// step appends a token to each response that is live. Its parts: sampler.cpp decodes, generation_ranks.cpp shares the
// work over ranks, generation_turns.cpp takes what an environment answers.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <utility>

#include "espalier/base/dtype.h"
#include "espalier/base/error.h"
#include "espalier/base/json.h"
#include "espalier/base/random.h"
#include "espalier/base/units.h"
#include "espalier/device/control_block.h"
#include "espalier/device/host_values.h"
#include "espalier/generate/kept_draws.h"
#include "espalier/generate/prompt_group.h"
#include "espalier/generate/sampler.h"
#include "espalier/model/decoder_pass.h"
#include "espalier/model/joined_experts.h"
#include "espalier/objective/fused_head.h"
#include "espalier/observe/timer.h"
#include "espalier/ops/operations.h"
#include "espalier/plan/dealing.h"
#include "espalier/rollout/json_text.h"
#include "espalier/rollout/kept_sets.h"
#include "espalier/shape/path_leaves.h"

namespace espalier::generation {

// A distinct prompt and every response to it.
struct PromptState {
  std::span<const std::int32_t> ids;
  std::vector<std::int32_t> history;  // a trajectory's, which are then the ids
  std::string where;
  std::int64_t dp_rank = -1;             // as Prompt has it
  std::vector<std::int64_t> responses;   // indices into the results
  std::int64_t longest = 0, places = 0;  // tokens of a response; responses that may be live at once
  std::size_t admitted = 0, finished = 0;
  std::unique_ptr<PromptGroup> group;  // while some are live

  std::int64_t prompt_rows() const { return static_cast<std::int64_t>(ids.size()); }
  std::int64_t live() const { return static_cast<std::int64_t>(admitted - finished); }
};

// A token with its log-prob over the whole vocabulary, and over what it was drawn from; `kept` empty: they are the
// same.
struct TokenChoice {
  std::int32_t token;
  double full_logprob, logprob;
  std::span<const std::int32_t> kept;
};

// A set of rows and the sequences that they append to.
struct AppendedRows {
  ModelInput input;
  GroupSource kv;
};

// The reason why a response ended.
enum class Finish : std::int64_t { none, stop, length, done, turns, abort };
inline constexpr std::array<const char*, 6> kFinishTexts = {"",         "\"stop\"",  "\"length\"",
                                                            "\"done\"", "\"turns\"", "\"abort\""};
inline constexpr const char* kRendered = "\"render\"";  // of a record: its history was rendered again

struct Response {
  PromptState* state;
  Random random;
  std::int64_t pending = 0;           // its newest tokens, whose rows have not been run
  std::int64_t turn_begin = 0;        // the first token of the turn
  std::int64_t turns = 0;             // that have ended
  std::int64_t limit = 0;             // tokens of prompt and response
  std::int64_t first_turn = 0;        // of the record
  std::int64_t rendered = 0;          // first tokens of the result's response that belong to the record's prompt
  std::vector<Rollout> earlier = {};  // records
  bool has_run = false;               // of rows in the prompt's group
  bool waits = false;                 // for an observation
  Finish finish = Finish::none;
};

class Generation {
 public:
  Generation(const Decoder& decoder, std::span<const Prompt> prompts, const SamplingSettings& settings, Arena& arena,
             Progress& progress);
  Generated run();

 private:
  // Responses whose next token depends on one row of hidden values: [begin[row], begin[row + 1]) of `response`.
  struct Asked {
    std::vector<std::int64_t> response;
    std::vector<std::int32_t> begin{0};
  };

  void make_prompts(std::span<const Prompt> prompts);
  void make_results(std::span<const Prompt> prompts);
  void keep_own_prompts();
  void gather_results();
  void gather_ends();
  void gather_report();
  bool somebody_runs(bool own);
  void admit();
  void open(PromptState& state);
  void compute_prompts(std::span<PromptState* const> opened);
  void compute_prompt_rows(AppendedRows& rows, std::vector<PromptState*>& ends);
  void step();
  void add_rows_of_step(AppendedRows& rows, Asked& asked);
  at::Tensor forward(AppendedRows& rows);
  at::Tensor hidden_of_step(AppendedRows& rows, Asked& asked);
  std::vector<TokenChoice> choose(const at::Tensor& hidden_OM, const Asked& asked);
  void append(std::int64_t response, const TokenChoice& choice);
  void settle(std::int64_t response, bool stopped_by_text);
  void end_turn(std::int64_t response);
  void finish(std::int64_t response, Finish reason);
  void keep_rows(std::int64_t response);
  bool anything_runs() const;
  void exchange_turns();
  void take_up(std::int64_t response, const NextTurn& next);
  void observe(std::int64_t response, std::span<const std::int32_t> ids);
  void add_silent(Rollout& rollout, std::int64_t count) const;
  static void clear_series(Rollout& rollout);
  void take_history(std::int64_t response, std::span<const std::int32_t> history);
  void move_to(std::int64_t response, std::span<const std::int32_t> history);
  bool admit_moved(std::int64_t& promised, std::vector<PromptState*>& opened);
  Rollout record_of(std::int64_t response) const;
  std::vector<std::vector<Rollout>> all_records();
  void cut_unfinished();
  Response& response(std::int64_t index) { return responses_[static_cast<std::size_t>(index)]; }
  Rollout& result(std::int64_t index) { return results_[static_cast<std::size_t>(index)]; }
  std::vector<std::uint8_t> stopped_by_text(std::span<const std::int64_t> responses);
  void count_held();
  std::int64_t promised_bytes(const PromptState& state, std::int64_t live) const;

  const Decoder& decoder_;
  const SamplingSettings& settings_;
  const ChoiceRule rule_;
  const bool keeps_sets_;
  Arena& arena_;
  Progress& progress_;
  std::int64_t kv_bytes_, state_bytes_;  // of one row; of a prompt, and of each response that lives
  std::int64_t kv_limit_, most_at_once_;

  std::vector<std::unique_ptr<PromptState>> prompts_;
  std::vector<Response> responses_;
  std::vector<Rollout> results_;
  std::vector<std::uint8_t> own_;  // of results: decoded by this rank
  std::vector<PromptState*> open_;
  std::vector<std::int64_t> fresh_;  // admitted, without a token yet, prompt by prompt
  std::size_t next_prompt_ = 0;
  std::vector<std::unique_ptr<PromptState>> histories_;  // of trajectories that left their prompts
  std::deque<PromptState*> moved_;                       // of these, those that wait for memory
  std::vector<EndedTurn> ended_;                         // turns to ask about
  std::vector<std::int64_t> asked_;                      // responses whose turns are being asked about
  std::int64_t asked_at_ = 0;                            // decode steps before
  std::int64_t live_ = 0, waiting_ = 0;
  std::int64_t prompt_rows_ = 0;  // of all prompts, each once
  std::int64_t done_ = 0;         // of the progress: rows of prompts and tokens of responses, each at its longest
  KeptDraws kept_;                // of the step
  GenerateReport report_;
  std::optional<ErrorText> failure_;
};

}  // namespace espalier::generation
