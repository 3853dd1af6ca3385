// Head and log-prob in one: log-probs, entropies and their gradients without ever holding rows x vocabulary.
//
// Shapes: O output rows, M width, V vocabulary, E edges. z_ov = hidden_o . weight_v / temperature_o,
//   lse_o = log sum_v exp z_ov ;  logprob_e = z_{o(e), target(e)} - lse_{o(e)} ;  entropy_o = lse_o - sum_v p_ov z_ov
//   dz_ov = sum_{e of o} g_e (1[v = target_e] - p_ov)  -  h_o p_ov (log p_ov + entropy_o)
// with g_e = dL/dlogprob_e and h_o = sum of dL/dentropy over the row's edges.
// Logits exist for one block of rows at a time ([block, V], taken from the arena), in the accumulator type
// (float32; float64 in float64 runs).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <span>

#include "espalier/device/arena.h"

namespace espalier {

struct HeadEdge {
  std::int32_t output;  // row of hidden_OM; edges are ordered by it
  std::int32_t target;
};

struct HeadProblem {
  at::Tensor hidden_OM;                 // float64, float32 or bfloat16, contiguous
  at::Tensor weight_VM;                 // same dtype
  std::span<const double> temperature;  // [O]
  std::span<const HeadEdge> edges;      // [E]
};

struct HeadGradients {
  at::Tensor grad_hidden_OM;  // same dtype as hidden, overwritten
  at::Tensor grad_weight_VM;  // accumulator dtype, added to
};

// Given an edge and its log-prob and entropy, returns dL/dlogprob and dL/dentropy.
struct HeadEdgeGradient {
  double logprob = 0, entropy = 0;
};
using EdgeGradientFunction = std::function<HeadEdgeGradient(std::int64_t edge, double logprob, double entropy)>;

// Bytes of arena the functions below take at most, for O rows: the logits block and its companions.
std::int64_t head_scratch_bytes(std::int64_t outputs, std::int64_t vocabulary, std::int64_t width,
                                at::ScalarType dtype);

// Calls visit with the first row of each block and its raw logits hidden_o . weight_v, [block, V] in the accumulator
// type, which are gone after the call: for who samples from them.
using LogitsFunction = std::function<void(std::int64_t first_row, const at::Tensor& logits_BV)>;
void for_each_logits(const at::Tensor& hidden_OM, const at::Tensor& weight_VM, const LogitsFunction& visit,
                     Arena& arena);

// Overwrites logprob [E] and entropy [E] (of the edge's row).
void head_forward(const HeadProblem& problem, std::span<double> logprob, std::span<double> entropy, Arena& arena);

// Recomputes the logits; grad_logprob and grad_entropy are [E].
void head_backward(const HeadProblem& problem, std::span<const double> grad_logprob,
                   std::span<const double> grad_entropy, const HeadGradients& out, Arena& arena);

// Both in one pass over the logits, for objectives whose derivative needs one token only. `gradient` is called once per
// edge, in order, from one thread.
void head_forward_backward(const HeadProblem& problem, const EdgeGradientFunction& gradient, std::span<double> logprob,
                           std::span<double> entropy, const HeadGradients& out, Arena& arena);

}  // namespace espalier
