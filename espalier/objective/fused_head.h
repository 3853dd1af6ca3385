// Head and log-prob in one: log-probs, entropies and their gradients, without a rows x vocabulary tensor.
//
// Shapes: O output rows, M width, V vocabulary, E edges, D distributions (a row has several if its edges have different
// kept sets). z_ov = shaped(hidden_o . weight_v) / temperature_o (LogitShape); log-prob, entropy and the gradient of a
// logit: ops/head.h. Logits exist for one block of
// rows at a time, or for two ([block, V], in the arena), in the accumulator type (float32; float64 in float64 runs);
// HeadBuffers (objective/head_buffers.h) declares all buffers. If the vocabulary is sharded over tp, each rank has the
// logits of its own V tokens: maxima, sums and the logits of targets are exchanged, and the gradients of the hidden
// rows are summed. With an addend of low rank (ops/low_rank.h) its A and B add to the product, in the accumulator type.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "espalier/device/arena.h"
#include "espalier/device/control_block.h"
#include "espalier/ops/head.h"
#include "espalier/ops/low_rank.h"
#include "espalier/parallel/mesh.h"

namespace espalier {

struct HeadEdge {
  std::int32_t output;  // row of hidden_OM; edges are ordered by it
  std::int32_t target;
  std::span<const std::int32_t> kept = {};  // the tokens it was drawn from, ascending; empty: the whole vocabulary
};

// The edges of a set of output rows, on the host and on the device. In a row, edges over the whole vocabulary come
// first; adjacent edges with equal kept sets are of one distribution.
class HeadEdges {
 public:
  // Adds the edges to the block; this object must not move before hand_over, and the kept sets must outlive it. Errors:
  // InternalError for edges that are out of order or out of range.
  void add_to(ControlBlock& block, std::span<const double> temperature_O, std::span<const HeadEdge> edges,
              std::int64_t vocabulary);
  std::size_t size() const { return static_cast<std::size_t>(begin_.back()); }
  std::int64_t outputs() const { return static_cast<std::int64_t>(begin_.size()) - 1; }

  // The edges of rows [first_row, first_row + rows), for logits of the tokens [first_token, first_token + columns).
  // Their kept sets, if any, are copied to the device.
  struct OfRows {
    std::int64_t begin, count;  // of the edges
    std::int64_t distributions;
    EdgeBlock block;
  };
  OfRows of_rows(std::int64_t first_row, std::int64_t rows, std::int64_t first_token, std::int64_t columns,
                 const LogitShape& shape, Device& device) const;

  at::Tensor temperature_D, begin_D1, target_E;  // on the device, after the block's hand_over

 private:
  KeptBlock sets_of(std::size_t from, std::size_t to, std::int64_t first_token, std::int64_t columns,
                    Device& device) const;

  std::vector<std::int32_t> begin_{0};  // [O + 1]: edges [begin_o, begin_{o + 1}) leave row o
  // If some edges have kept sets: row o has the distributions [first_o, first_{o + 1}). Otherwise row o has one, o.
  std::vector<std::int32_t> first_;                  // [O + 1]
  std::vector<std::span<const std::int32_t>> kept_;  // [D]
};

// The part of the vocabulary that the head's weight rows cover, and the ranks that have the other parts.
struct VocabularyPart {
  std::int64_t first = 0;    // the token of row 0
  std::int64_t largest = 0;  // rows of the largest part, so that all ranks cut equal blocks; 0: this part
  Group& tp = mesh_of_one().tp;
  LogitShape logits = {};  // changes of the product
  LowRank low_rank = {};   // added to the product, B with the rows of the weight; undefined: nothing is
};

struct HeadProblem {
  at::Tensor hidden_OM;  // float64, float32 or bfloat16, contiguous
  at::Tensor weight_VM;  // same dtype, or bfloat16 if hidden is float32
  const HeadEdges& edges;
  VocabularyPart part = {};
};

struct HeadGradients {
  at::Tensor grad_hidden_OM;  // same dtype as hidden, overwritten
  at::Tensor grad_weight_VM;  // accumulator dtype, added to; undefined: the weight has no gradient
  LowRank low_rank = {};      // the same of A and B
};

// Called once per block of rows, in order: given the log-probs and entropies of edges [first, first + n), overwrites
// dL/dlogprob and dL/dentropy, each [n].
using HeadObjective =
    std::function<void(std::size_t first, std::span<const double> logprob, std::span<const double> entropy,
                       std::span<double> grad_logprob, std::span<double> grad_entropy)>;

// For samplers: calls visit with the first row of each block and its logits shaped(hidden_o . weight_v), before the
// temperature: [block, V] in the accumulator type, of this rank's V tokens. They are valid during the call only.
using LogitsFunction = std::function<void(std::int64_t first_row, const at::Tensor& logits_BV)>;
void for_each_logits(const at::Tensor& hidden_OM, const at::Tensor& weight_VM, const VocabularyPart& part,
                     const LogitsFunction& visit, Arena& arena);

// For samplers: the log-probs of the edges of rows [first_row, first_row + B), which are drawn from logits that
// for_each_logits has visited, of the whole vocabulary. The same operations as in head_forward.
std::vector<double> logprobs_of_logits(const at::Tensor& logits_BV, const HeadEdges& edges, std::int64_t first_row,
                                       Device& device);

// Overwrites logprob [E] and entropy [E] (of the edge's distribution).
void head_forward(const HeadProblem& problem, std::span<double> logprob, std::span<double> entropy, Arena& arena);

// Recomputes the logits; grad_logprob and grad_entropy are [E]. HeadGradients says what is overwritten or added to.
void add_head_backward(const HeadProblem& problem, std::span<const double> grad_logprob,
                       std::span<const double> grad_entropy, const HeadGradients& out, Arena& arena);

// Both in one pass over the logits, for objectives whose derivative needs one token only.
void add_head_forward_backward(const HeadProblem& problem, const HeadObjective& objective, const HeadGradients& out,
                               Arena& arena);

}  // namespace espalier
