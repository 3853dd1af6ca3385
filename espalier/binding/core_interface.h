// The C interface of the core library, for other languages: prefix trees and the plan of a step. It needs no torch. The
// shared library libespalier_core.so exports the functions of this header and of kernel_interface.h, and nothing else.
// A complete program: examples/c_interface/plan.c. The Python package calls the library in python/espalier/native.py.
//
// Tokens are int32, offsets int64. A function that fails returns null or -1; espalier_last_error() then describes the
// error. Use a handle in one thread at a time.
#pragma once

#include <stdint.h>

#define ESPALIER_EXPORT __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

// N rollouts, end to end. Rollout i is tokens[starts[i], starts[i + 1]). Its first prompt_lengths[i] tokens, at least
// one, are the prompt. The caller may free the arrays after the call.
typedef struct {
  int64_t rollouts;               // N
  const int32_t* tokens;          // [starts[N]]
  const int64_t* starts;          // [N + 1]
  const int64_t* prompt_lengths;  // [N]
} espalier_rollouts;

// Sizes of the model, each at least 1. inner is the width of the MLP. A dense model has experts = 0.
typedef struct {
  int64_t layers, hidden, inner, heads, kv_heads, head_dim, vocabulary;
  int64_t experts, experts_per_token, expert_inner;
} espalier_shape;

// The texts are values of the options of the same names (docs/options.md): schedule "auto", "dense", "packed",
// "phased"; share "auto", "prompt", "off"; trunk_state "auto", "keep", "recompute"; dtype "float64", "float32",
// "bfloat16"; device "cpu", "cuda".
typedef struct {
  int64_t wave_tokens;      // largest number of rows of a wave; 0: the plan chooses
  int64_t threads;          // CPU threads of the step
  double seconds_per_call;  // time that the caller needs to start one kernel; 0: that of the engine
  int32_t gradients;        // 1: forward and backward; 0: forward only
  const char *schedule, *share, *trunk_state, *dtype, *device;
} espalier_plan_request;

typedef struct espalier_plan espalier_plan;

// The error of this thread's last failed call: a JSON object with kind, exit_code, where, expected, got, remedy. The
// text is valid until the thread's next failed call.
ESPALIER_EXPORT const char* espalier_last_error(void);

// The option table as JSON: {"verbs": {name: letter}, "options": [{name, section, type, default, range, unit, ...}],
// "aliases": {TRL's or peft's name: [options that it sets]}}.
ESPALIER_EXPORT const char* espalier_options(void);

// Writes groups[i], the group of rollout i: rollouts with equal prompts have one group. Groups are numbered from 0 in
// order of first appearance. Returns 0, or -1 on error.
ESPALIER_EXPORT int32_t espalier_group(const espalier_rollouts* rollouts, int32_t* groups);

// Plans one step over all rollouts, with a loss edge for every response token. Returns null on error. Free the plan
// with espalier_plan_delete.
ESPALIER_EXPORT espalier_plan* espalier_plan_new(const espalier_rollouts* rollouts, const espalier_shape* shape,
                                                 const espalier_plan_request* request);
ESPALIER_EXPORT void espalier_plan_delete(espalier_plan* plan);

// The number of items (trunks and waves). Items are numbered depth first: a trunk comes before the items below it.
ESPALIER_EXPORT int64_t espalier_plan_items(const espalier_plan* plan);

// One table of one item, row-major. Returns its number of rows, or -1 on error, and sets *width to its number of
// columns and *data to its values. The values are valid until the plan's next call. Columns
// (espalier/program/step_plan.h):
//   "item"      one row: kind (1: trunk, 0: wave), recompute (0 or 1), parent (-1: none), path_rows, rows, outputs
//   "segments"  rollout, begin, end, row, subtree_end, multiplicity, first, last
//   "runs"      first, end, below: rows [first, end) see each other causally, rows [end, below) see all of them
//               (espalier/program/causal_runs.h)
//   "edges"     row, target, rollout, position
//   "rollouts"  one column: the rollouts of the item, depth first
//   "finished"  one column: the rollouts whose last loss edge is in the item
ESPALIER_EXPORT int64_t espalier_plan_table(espalier_plan* plan, int64_t item, const char* table, const int32_t** data,
                                            int64_t* width);

// The rank program: the steps of a pass in the order in which they run (espalier/program/program.h). Returns their
// number, or -1 on error, and sets *steps to rows of two columns: forward (1: a forward, 0: a backward, which without
// gradients only ends its item), item. Valid until the plan's next call.
ESPALIER_EXPORT int64_t espalier_plan_program(espalier_plan* plan, const int32_t** steps);

// The runs of `rows` rows of which row i sees row j if j <= i < subtree_end[j]: writes first, end, below of each, with
// the meaning of the table "runs", to runs [rows, 3]. Returns their number, or -1 on error.
ESPALIER_EXPORT int64_t espalier_causal_runs(const int32_t* subtree_end, int64_t rows, int32_t* runs);

// The plan as the JSON object of `espalier plan --json`, and as text for people. Valid until the plan's next call.
ESPALIER_EXPORT const char* espalier_plan_json(espalier_plan* plan);
ESPALIER_EXPORT const char* espalier_plan_text(espalier_plan* plan);

#ifdef __cplusplus
}
#endif
