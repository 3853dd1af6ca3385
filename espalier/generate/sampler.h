// Batched sampling: n responses to each prompt, whose keys and values are computed once and read by all of them.
//
// A decode step runs one row for each live response of all prompts, so that weights are read once a step. Attention
// runs once a prompt, over the prompt's rows (the path) and the rows of its responses (own), with the operation that
// training uses (ops/attention/operations.h). A response that ends frees its place for the next one at once. Equal
// prompts are one prompt. Distinct prompts are dealt to the ranks of dp; the ranks of tp decode the same prompts, each
// with its heads.
//
// With `turns` a response is a trajectory: where the model stops, an observation's tokens follow and sampling goes on.
// Keys and values stay, so an observation costs only its own rows, several of which run in one step. While some
// trajectories wait for observations, the others are decoded.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/device/arena.h"
#include "espalier/generate/step_rows.h"
#include "espalier/generate/turns.h"
#include "espalier/metrics/progress.h"
#include "espalier/model/decoder.h"
#include "espalier/rollout/rollout.h"
#include "espalier/services/stop_strings.h"

namespace espalier {

// Decode steps of the other trajectories while some wait for their observations.
inline constexpr std::int64_t kStepsAhead = 4;

struct SamplingSettings {
  std::int64_t n = 1;      // responses to a prompt
  double temperature = 1;  // 0: always the most likely token, the lowest id among equals
  double top_p = 1;
  std::int64_t top_k = 0;                  // below 1: all
  std::int64_t max_response_length = 256;  // tokens of all turns; fewer where the model's positions end first
  std::vector<std::int32_t> stop_ids;      // a response, or a turn, ends with the first of them
  StopStrings* stops = nullptr;            // or with the token that completes one of these texts; null: none
  std::int64_t max_num_seqs = 0;    // responses decoded at once; 0: what kv_limit_bytes holds, at most kMostDecoded
  std::int64_t token_budget = 0;    // rows of prompts, or of observations, computed at once; 0: kMostPromptRows
  std::int64_t kv_limit_bytes = 0;  // of keys and values held at once; 0: half of the free memory
  std::uint64_t seed = 0;
  Turns* turns = nullptr;       // null: a response is one turn
  std::int64_t most_turns = 1;  // of a trajectory
  bool renders = false;         // --observations render: `turns` may answer with histories
  bool kept_sets = false;       // log-probs are over what top_k and top_p keep, which rollouts record
  bool share_prompts = true;    // false: the prompt is computed and held for every response (the comparison)
};

struct Prompt {
  std::vector<std::int32_t> ids;  // at least one
  std::int64_t observed = 0;      // number of the last ids that count towards max_response_length
  std::int64_t dp_rank = -1;      // the rank that decodes its responses; -1: prompts are dealt
  std::string group, carried;     // JSON text, as in rollout.h
  std::string where;              // "prompts.jsonl:3"; for messages
};

struct GenerateReport {
  std::int64_t prompts = 0, responses = 0;
  std::int64_t prompt_rows_logical = 0, prompt_rows_physical = 0;  // one prompt per response; rows that were computed
  std::int64_t response_tokens = 0, decode_steps = 0;
  std::int64_t turns = 0, observation_tokens = 0;  // of trajectories; response_tokens counts sampled tokens alone
  bool kept_sets = false;                          // log-probs are over kept sets
  std::int64_t kept_ids = 0;                       // of all sampled tokens
  double seconds_prompt = 0, seconds_decode = 0;
  std::int64_t kv_bytes = 0;           // most keys, values and recurrent states that this rank held at once
  std::int64_t kv_bytes_unshared = 0;  // the same if each response held its own prompt
};

struct Generated {
  std::vector<Rollout> rollouts;
  std::vector<std::int64_t> trajectory;  // one per rollout: the response that it is a record of
  GenerateReport report;
  std::optional<ErrorText> failure;  // of `turns`; `rollouts` has the tokens that were sampled before it
};

// Positions that generate() needs the decoder's rotary tables to cover (Decoder::reserve_positions).
std::int64_t positions_needed(const ModelShape& shape, std::span<const Prompt> prompts,
                              const SamplingSettings& settings);

// Responses in prompt order, n for each prompt: prompt_ids, response_ids (the stop token included), loss_mask all 1,
// rollout_logprobs, temperature, group (the prompt's own, else its ordinal), carried (the prompt's, and
// "finish_reason": "stop" or "length"), index, where (the prompt's).
//
// With `turns`, response_ids contains the observations, with loss_mask 0 and rollout_logprobs 0. A trajectory ends
// where the environment ends it ("finish_reason": "done"), after most_turns turns ("turns"), or where an observation
// and one more token no longer fit ("length"). The answer to its last turn is left out. Answers of `turns` are used at
// most kStepsAhead steps after the request, at steps that do not depend on their duration. A failure of `turns` ends
// the sampling of its rank; unfinished trajectories are then cut ("abort"). Every rank is told the failure of the first
// rank that has one.
//
// An answer of `turns` may be a history, which replaces the trajectory's tokens. If it begins with them, only the rest
// is new. Otherwise the record ends ("finish_reason": "render"), and the trajectory goes on in a further one, whose
// prompt_ids are the history. Keys and values of the tokens that both have in common stay, unless the history differs
// inside the prompt or the model has recurrent layers. With `renders`, records have `trajectory` and `turn`, the
// index of their first turn; a trajectory's records follow each other.
//
// rollout_logprobs are log-softmax(logits / temperature) over the whole vocabulary, before top-k and top-p, as training
// computes them. At temperature 0 they are as at temperature 1, and the record's temperature is 1. With kept_sets,
// rollouts record what top-k and top-p kept for each token (kept_sets, for tokens with less than the whole vocabulary);
// rollout_logprobs are then over these sets, as training computes them, and full_logprobs over the whole vocabulary.
// Random numbers depend on (seed, prompt, response, position) alone. So a response does not depend on the number of
// responses decoded at once, on threads or on sharing, except where rounding decides between two tokens.
// Activations come from `arena`; keys and values have memory of their own. Every rank of the decoder's mesh calls it
// with the same prompts and settings and gets all responses; rows and tokens of the report are totals over dp,
// steps and seconds maxima.
// The decoder's rotary tables must cover positions_needed. Errors: OptionError for settings out of range; InputError
// for prompts that are empty, leave the model no position, begin with an observation as long as a response may be, or
// hold ids beyond the vocabulary, and for logits that are not finite; MemoryBudgetError where not even one response
// fits.
Generated generate(const Decoder& decoder, std::span<const Prompt> prompts, const SamplingSettings& settings,
                   Arena& arena, Progress& progress);

}  // namespace espalier
