// The C interface of the torch-free core, for other languages: prefix trees and the plan of a step. The shared library
// build/libespalier_core.so exports these functions and nothing else; python/espalier/native.py is their one caller.
//
// Tokens cross the border as int32, offsets as int64. A function that fails returns null or -1, and
// espalier_last_error() says why. Handles may be used by one thread at a time.
#pragma once

#include <stdint.h>

#define ESPALIER_EXPORT __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

// N rollouts end to end. Rollout i is tokens[starts[i], starts[i + 1]), its first prompt_lengths[i] (at least one) are
// the prompt. Everything is copied where it must outlive the call.
typedef struct {
  int64_t rollouts;               // N
  const int32_t* tokens;          // [starts[N]]
  const int64_t* starts;          // [N + 1]
  const int64_t* prompt_lengths;  // [N]
} espalier_rollouts;

// The sizes that decide cost; `experts` 0: no mixture.
typedef struct {
  int64_t layers, hidden, inner, heads, kv_heads, head_dim, vocabulary;
  int64_t experts, experts_per_token, expert_inner;
} espalier_shape;

// Names are the option table's: dtype, schedule, share, trunk_state; device "cpu" or "cuda".
typedef struct {
  int64_t wave_tokens;  // most rows of one set; 0: chosen
  int64_t threads;
  double seconds_per_call;  // overhead of one kernel as the caller starts them; 0: the engine's own
  int32_t gradients;        // 0: forward only
  const char *schedule, *share, *trunk_state, *dtype, *device;
} espalier_plan_request;

typedef struct espalier_plan espalier_plan;

// The error of this thread's last failed call: a JSON object with kind, exit_code, where, expected, got, remedy.
ESPALIER_EXPORT const char* espalier_last_error(void);

// The option table as JSON: {"verbs": {name: letter}, "options": [{name, section, type, default, range, unit, ...}],
// "aliases": {TRL's or peft's name: [options that it sets]}}.
ESPALIER_EXPORT const char* espalier_options(void);

// groups[i]: the group of rollout i, equal prompts, numbered from 0 in order of first appearance. 0 or -1.
ESPALIER_EXPORT int32_t espalier_group(const espalier_rollouts* rollouts, int32_t* groups);

// Plans one step over all rollouts; every response token has a loss edge. Null on error.
ESPALIER_EXPORT espalier_plan* espalier_plan_new(const espalier_rollouts* rollouts, const espalier_shape* shape,
                                                 const espalier_plan_request* request);
ESPALIER_EXPORT void espalier_plan_delete(espalier_plan* plan);
ESPALIER_EXPORT int64_t espalier_plan_items(const espalier_plan* plan);

// One table of one item (step_plan.h), row-major; *width is its columns, the result its rows (-1: error), *data valid
// until the plan's next call. Items are numbered depth first, a trunk before what is below it.
//   "item"      one row: kind (1: trunk), recompute, parent (-1: none), path_rows, rows, outputs
//   "segments"  rollout, begin, end, row, subtree_end, multiplicity, first, last
//   "edges"     row, target, rollout, position
//   "rollouts", "finished"  one column
ESPALIER_EXPORT int64_t espalier_plan_table(espalier_plan* plan, int64_t item, const char* table, const int32_t** data,
                                            int64_t* width);
// The plan as the JSON object of `espalier plan`, and as text for a person. Valid until the plan's next call.
ESPALIER_EXPORT const char* espalier_plan_json(espalier_plan* plan);
ESPALIER_EXPORT const char* espalier_plan_text(espalier_plan* plan);

#ifdef __cplusplus
}
#endif
