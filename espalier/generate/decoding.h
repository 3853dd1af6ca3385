// The one machine below `generate`, the loop of `grpo`, and `serve`: responses are added at any time, each with its own
// rules, and decoded side by side.
//
// A step runs one row for each live response of all prompts, so that weights are read once a step. Attention runs once
// a prompt, over the prompt's rows (the path) and the rows of its responses (own), with the operation that training
// uses (ops/attention/operations.h). A response that ends frees its place for the next one.
//
// Equal prompts share their keys and values. Where kept_prompts is set, what several prompts begin with is computed
// once, too: rows that another prompt has are copied.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "espalier/base/random.h"
#include "espalier/device/arena.h"
#include "espalier/generate/prompt_group.h"
#include "espalier/generate/step_rows.h"
#include "espalier/model/decoder.h"
#include "espalier/objective/fused_head.h"
#include "espalier/ops/choice.h"
#include "espalier/rollout/rollout.h"
#include "espalier/services/stop_strings.h"

namespace espalier {

struct DecodingLimits {
  std::int64_t most_at_once = kMostDecoded;     // responses
  std::int64_t token_budget = kMostPromptRows;  // rows of prompts, or of given tokens, computed at once
  std::int64_t kv_bytes = 0;                    // of keys and values held at once
  std::int64_t prompt_rows = 0;                 // of prompts computed in one step, at most; 0: of all that have a place
  bool share_prompts = true;      // false: the prompt is computed and held for every response (the comparison)
  std::int64_t spare_places = 0;  // responses that may join a prompt after its first step
  std::int64_t kept_prompts = 0;  // whose rows stay after their last response, while memory allows
  bool may_wait = false;          // the first response waits where there is no memory for it; else that is an error
};

// The rules of one response.
struct DecodingRules {
  ChoiceRule choice;
  std::int64_t longest = 0;            // tokens
  std::vector<std::int32_t> stop_ids;  // it ends with the first of them
  StopStrings* stops = nullptr;        // or with the token that completes one of these texts; null: none
  Random random{0};                    // draws one number for each token
  bool raw_logprobs = false;           // log-probs at temperature 1, whatever the temperature is
  bool kept_sets = false;              // log-probs are over what top_k and top_p keep; for temperatures above 0
  std::int64_t top = 0;                // the likeliest tokens beside each sampled one
};

struct TokenLogprob {
  std::int32_t token = 0;
  double logprob = 0;
};
using LikelyTokens = std::vector<TokenLogprob>;  // the likeliest first; of equals the lowest id

enum class ResponseEnd { none, stop, length };

struct DecodedResponse {
  std::vector<std::int32_t> tokens;
  std::vector<double> logprobs;         // 0 for given tokens
  std::vector<double> full_logprobs;    // with DecodingRules::kept_sets: over the whole vocabulary
  KeptSets kept_sets;                   // with DecodingRules::kept_sets; no set: the whole vocabulary
  std::vector<LikelyTokens> likeliest;  // with DecodingRules::top; empty for given tokens
  std::vector<std::uint8_t> sampled;    // 0 for given tokens
  ResponseEnd end = ResponseEnd::none;
  std::int64_t cached_rows = 0;  // of the prompt, which were there before the response began
};

// Log-probs over the positions of a prompt: row i has the distribution after tokens [0, i]. The temperature is 1, and
// the log-probs are bitwise identical to a training pass's.
struct PromptReading {
  std::vector<HeadEdge> edges;  // whose `output` is the row, ascending
  std::int64_t top = 0;         // the likeliest tokens of each row
  std::int64_t draws = 0;       // tokens drawn for each row
  ChoiceRule draw_rule;
  Random random{0};

  std::vector<double> logprobs;                  // filled: of the edges
  std::vector<LikelyTokens> likeliest;           // filled: of every row
  std::vector<std::vector<TokenLogprob>> drawn;  // filled: of every row
};

struct DecodingCounts {
  std::int64_t prompt_rows = 0, decode_steps = 0, sampled_tokens = 0;
  std::int64_t kept_ids = 0;           // of all tokens sampled with kept sets
  std::int64_t kv_bytes = 0;           // most keys, values and recurrent states held at once
  std::int64_t kv_bytes_unshared = 0;  // the same if each response held its own prompt
  double seconds_prompt = 0;
};

class Decoding {
 public:
  // Activations come from `arena`; keys and values have memory of their own. Both arguments must outlive the object.
  // The decoder's rotary tables must cover every row.
  Decoding(const Decoder& decoder, const DecodingLimits& limits, Arena& arena);
  ~Decoding();
  Decoding(const Decoding&) = delete;
  Decoding& operator=(const Decoding&) = delete;

  // Adds responses to a prompt, which has at least one token; they wait for places in the order in which they came.
  // Returns the first one's number; the others follow. `where`: the prompt's place, for messages. `reading` (may be
  // null) must live until the prompt was computed; it is then filled.
  std::int64_t add(std::vector<std::int32_t> prompt, std::vector<DecodingRules> responses, const std::string& where,
                   std::shared_ptr<PromptReading> reading = nullptr);
  // A response to a prompt of its own, before all that were given to add() and wait.
  std::int64_t add_first(std::vector<std::int32_t> prompt, DecodingRules rules, const std::string& where);
  // Gives places to waiting responses, computes their prompts, and samples one token for every running response.
  // Returns the responses that ended, which keep their rows until they are removed or continued. Errors: InputError for
  // logits that are not finite; MemoryBudgetError where not even one response fits. After an error nothing more may be
  // done.
  std::vector<std::int64_t> step();

  // Responses with a place that have not ended; responses without one.
  std::int64_t running() const { return running_; }
  std::int64_t waiting() const { return waiting_; }
  // Responses that hold a place.
  std::int64_t held() const { return held_; }

  const DecodedResponse& response(std::int64_t number) const;
  const DecodingRules& rules(std::int64_t number) const;
  // Tokens follow an ended response, and sampling goes on behind them.
  void carry_on(std::int64_t number, std::span<const std::int32_t> tokens);
  // `tokens`, at least one, take the place of an ended response's, and sampling goes on behind them. The rows of what
  // both begin with stay. False, and nothing changes, where rows carry states, which cannot go back.
  bool restart(std::int64_t number, std::span<const std::int32_t> tokens);
  // Frees the response's place; its tokens are gone. In any state.
  void remove(std::int64_t number);

  const DecodingCounts& counts() const { return counts_; }
  Arena& arena() const { return arena_; }
  // Bytes of keys, values and states that live responses may come to hold, and of kept prompts.
  std::int64_t promised_bytes() const;
  void set_kv_bytes(std::int64_t bytes) { limits_.kv_bytes = bytes; }
  // Called before every forward of the decoder: where ranks run theirs together.
  void set_before_forward(std::function<void()> call) { before_forward_ = std::move(call); }
  // Called with the rows of prompts that have been computed, and with the tokens of a step, for those who show
  // progress.
  void set_on_rows(std::function<void(std::int64_t rows)> call) { on_rows_ = std::move(call); }
  void set_on_tokens(std::function<void(std::int64_t tokens)> call) { on_tokens_ = std::move(call); }

 private:
  struct Prompt;
  struct Response;
  struct AppendedRows;
  struct ChoiceRows;

  struct Draws;

  Response& at(std::int64_t number) const;
  Prompt& new_prompt(std::list<std::unique_ptr<Prompt>>::iterator before, const std::vector<std::int32_t>& ids,
                     const std::string& where);
  std::int64_t add_response(Prompt& prompt, DecodingRules rules, bool is_cached);
  Prompt* joinable(const std::vector<std::int32_t>& ids, std::int64_t responses, std::int64_t longest, bool reads);
  void admit();
  bool make_room(std::int64_t bytes);
  std::list<std::unique_ptr<Prompt>>::iterator oldest_unused();
  void open(Prompt& prompt);
  void take_known_rows(Prompt& prompt);
  void compute_prompts();
  void compute_prompt_rows(AppendedRows& rows);
  void read_prompt(Prompt& prompt, const at::Tensor& hidden_OM, std::int64_t first_row);
  at::Tensor forward(AppendedRows& rows);
  void add_rows_of_step(AppendedRows& rows, ChoiceRows& asked);
  at::Tensor hidden_of_step(AppendedRows& rows, ChoiceRows& asked);
  void choose(const at::Tensor& hidden_OM, const ChoiceRows& asked, std::vector<std::int64_t>& chosen);
  void choose_alike(const at::Tensor& hidden_OM, const ChoiceRows& rows, std::vector<std::int64_t>& chosen);
  Draws draw(const at::Tensor& hidden_OM, const ChoiceRule& rule, double temperature, bool kept_sets,
             const std::vector<std::int32_t>& begin, const std::vector<double>& uniforms);
  std::vector<double> logprobs_of(const at::Tensor& hidden_OM, std::span<const HeadEdge> edges);
  std::vector<LikelyTokens> likeliest_of(const at::Tensor& hidden_OM, std::int64_t count);
  VocabularyPart vocabulary_part() const;
  void append(std::int64_t number, const Draws& draws, std::size_t draw);
  static void add_given(Response& response, std::span<const std::int32_t> tokens);
  void go_on(std::int64_t number, Response& response);
  std::vector<std::int64_t> end_some(std::span<const std::int64_t> chosen);
  void close_if_unused(Prompt& prompt);
  void count_held();
  std::int64_t promised_bytes(const Prompt& prompt, std::int64_t live) const;

  const Decoder& decoder_;
  DecodingLimits limits_;
  Arena& arena_;
  std::int64_t kv_bytes_, state_bytes_;         // of one row; of a prompt, and of each response that lives
  std::list<std::unique_ptr<Prompt>> prompts_;  // in the order in which they came
  std::map<std::int64_t, std::unique_ptr<Response>> responses_;
  std::vector<Prompt*> opened_;      // whose rows are being computed, in order
  std::vector<std::int64_t> fresh_;  // without a token yet, of prompts that have been computed, prompt by prompt
  std::int64_t next_number_ = 0, running_ = 0, waiting_ = 0, held_ = 0;
  std::uint64_t clock_ = 0;
  DecodingCounts counts_;
  std::function<void()> before_forward_;
  std::function<void(std::int64_t)> on_rows_, on_tokens_;
};

}  // namespace espalier
