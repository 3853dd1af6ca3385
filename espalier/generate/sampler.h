// Batched sampling: n responses to each prompt, the prompt's keys and values computed once and read by all of them.
//
// Every step runs one row for each live response of all prompts, so that weights are read once a step; attention runs
// once a prompt, over the prompt's rows (the path) and the rows of its responses (own), by the contract that training
// uses (attention/attention.h). A response that ends frees its place for the next one at once. Equal prompts are one
// prompt. Distinct prompts are dealt to the ranks of dp; those of tp decode the same ones, each with its heads.
//
// With `turns` a response is a trajectory: where the model stops, an observation's tokens follow and sampling goes on.
// Keys and values stay, so an observation costs only its own rows, several of them in one step. While some trajectories
// wait for observations, the others are decoded.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/device/arena.h"
#include "espalier/generate/turns.h"
#include "espalier/model/decoder.h"
#include "espalier/observe/progress.h"
#include "espalier/rollout/rollout.h"
#include "espalier/text/stop_strings.h"

namespace espalier {

// More rows at once do not make products faster.
inline constexpr std::int64_t kMostDecoded = 1024, kMostPromptRows = 1024;
// Tokens that the other trajectories get while some wait for their observations.
inline constexpr std::int64_t kStepsAhead = 4;

struct SamplingSettings {
  std::int64_t n = 1;      // responses to a prompt
  double temperature = 1;  // 0: always the likeliest token, the lowest id of several
  double top_p = 1;
  std::int64_t top_k = 0;                  // below 1: all
  std::int64_t max_response_length = 256;  // tokens, of all turns; shorter where the model's positions end first
  std::vector<std::int32_t> stop_ids;      // a response ends with the first of them
  StopStrings* stops = nullptr;            // or with the token that completes one of these texts; null: none
  std::int64_t max_num_seqs = 0;    // responses decoded at once; 0: what kv_limit_bytes holds, at most kMostDecoded
  std::int64_t token_budget = 0;    // prompt rows computed at once; 0: kMostPromptRows
  std::int64_t kv_limit_bytes = 0;  // of keys and values held at once; 0: half of the memory that is free
  std::uint64_t seed = 0;
  Turns* turns = nullptr;       // null: a response is one turn
  std::int64_t most_turns = 1;  // of a trajectory
  bool share_prompts = true;    // false: the prompt is computed and held for every response (the comparison)
};

struct Prompt {
  std::vector<std::int32_t> ids;  // at least one
  std::int64_t observed = 0;      // how many of the last ids count towards max_response_length
  std::int64_t dp_rank = -1;      // the rank of dp that decodes its responses; -1: they are dealt
  std::string group, carried;     // JSON text, as in rollout.h
  std::string where;              // "prompts.jsonl:3"; for messages
};

struct GenerateReport {
  std::int64_t prompts = 0, responses = 0;
  std::int64_t prompt_rows_logical = 0, prompt_rows_physical = 0;  // if every response had its own; computed
  std::int64_t response_tokens = 0, decode_steps = 0;
  std::int64_t turns = 0, observation_tokens = 0;  // of trajectories; response_tokens are the model's alone
  double seconds_prompt = 0, seconds_decode = 0;
  std::int64_t kv_bytes = 0;           // most keys and values held at once
  std::int64_t kv_bytes_unshared = 0;  // the same, had each response held its prompt
};

struct Generated {
  std::vector<Rollout> rollouts;
  GenerateReport report;
  std::optional<ErrorText> failure;  // of `turns`: what was sampled until then is in `rollouts`
};

// Positions that generate() needs the decoder's rotary tables to cover (Decoder::reserve_positions).
std::int64_t positions_needed(const ModelShape& shape, std::span<const Prompt> prompts,
                              const SamplingSettings& settings);

// Bytes of activations for `rows` rows at once.
std::int64_t sampling_bytes(const LocalShape& shape, DType dtype, std::int64_t rows);

// Responses in prompt order, n for each prompt: prompt_ids, response_ids (the stop token included), loss_mask all 1,
// rollout_logprobs, temperature, group (the prompt's own, else its ordinal), carried (the prompt's, and
// "finish_reason": "stop" or "length"), index, where (the prompt's).
//
// With `turns` observations stand in response_ids, with loss_mask 0 and rollout_logprobs 0. A trajectory ends where the
// environment says so ("finish_reason": "done"), after most_turns turns ("turns"), or where an observation and one more
// token no longer fit ("length"); in the last two cases the last observation is left out. Answers of `turns` are used
// at most kStepsAhead steps after the request, at steps that do not depend on their duration. A failure of `turns` ends
// the sampling of its rank; unfinished trajectories are then cut ("abort"). Every rank is told the failure of the first
// one that has one.
//
// rollout_logprobs are log-softmax(logits / temperature) over the whole vocabulary, before top-k and top-p: what
// training computes again. At temperature 0 they are those of temperature 1, which is then also the record's.
// Random numbers depend on (seed, prompt, response, position) alone. So a response does not depend on how many are
// decoded at once, on threads or on sharing, but where floating-point rounding decides between two tokens.
// Activations come from `arena`; keys and values have memory of their own. Every rank of the decoder's mesh calls it
// with the same prompts and settings and gets all responses; rows and tokens of the report are those of all ranks.
// Errors: OptionError for settings out of range; InputError for prompts that are empty, leave no position of the model
// for a response or hold ids beyond the vocabulary, and for logits that are not finite; MemoryBudgetError where not
// even one response fits.
Generated generate(const Decoder& decoder, std::span<const Prompt> prompts, const SamplingSettings& settings,
                   Arena& arena, Progress& progress);

}  // namespace espalier
