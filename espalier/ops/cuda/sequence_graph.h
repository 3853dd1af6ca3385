// Description for a cuDNN graph: attention within sequences of rows, and the memory that it reads and writes.
//
// Sequence b has n_b queries and m_b keys (int32, [B, 1, 1, 1] each). Every tensor x has an offset o_b (int64,
// elements, [B + 1, 1, 1, 1]) to its first row. Element (b, h, i, d) of x, with i below n_b or m_b, is at
//   x + o_b + h stride[1] + i stride[2] + d
// Sequences of any length can share a graph: it is built for B sequences of at most `queries` and `keys` rows, all
// powers of two, and unused sequences have length 0.
//
//   out = softmax(scale q k^T) v ;  stats = the natural logarithm of the softmax's denominator
// Causal: query i sees keys 0 to i.
//
// Shapes: B sequences, H query heads, J key/value heads, D head size.
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace espalier::cuda {

struct SequenceGraph {
  bool backward = false, causal = false;
  bool deterministic = true;                                                    // a backward sums in one order
  std::int64_t sequences = 0, queries = 0, keys = 0;                            // B, and the most rows of a sequence
  std::int64_t query_heads = 0, key_heads = 0, head_size = 0;                   // H, J, D
  std::int64_t q_row = 0, k_row = 0, v_row = 0, out_row = 0, grad_out_row = 0;  // row strides in elements
  double scale = 1;

  auto operator<=>(const SequenceGraph&) const = default;
};

enum class Operand : std::uint8_t { q, k, v, out, stats, grad_out, grad_q, grad_k, grad_v };
inline constexpr std::size_t kOperands = 9;

// The addresses of one run: each operand of the graph and its offsets, and the lengths.
struct SequenceAddresses {
  std::array<void*, kOperands> operand{}, offset{};
  void* queries = nullptr;
  void* keys = nullptr;
};

// One operand, [B, heads, rows, size]. `strides`: elements between neighbours.
struct OperandPlace {
  Operand operand;
  bool written, of_queries;
  std::array<std::int64_t, 4> dims, strides;
};
std::vector<OperandPlace> places_of(const SequenceGraph& graph);

// The smallest power of two that holds `rows`, at least `least`.
std::int64_t size_class(std::int64_t rows, std::int64_t least);

// True if a deterministic backward of this cuDNN adds to the gradients of queries in turn, in float32. Then it keeps no
// number for each pair of a query and a key. cuDNN 9.25 can, on compute capability 9, if cudnn-frontend is told so.
bool can_add_in_turn(std::size_t cudnn_version, int capability);

// Graphs, built on first use and kept.
class SequenceGraphs {
 public:
  virtual ~SequenceGraphs() = default;
  virtual bool adds_in_turn() const { return false; }
  // Workspace bytes of a run of the graph. Errors: DeviceError if the library has no such graph.
  virtual std::int64_t workspace_bytes(const SequenceGraph& graph) = 0;
  virtual void run(const SequenceGraph& graph, const SequenceAddresses& addresses, void* workspace) = 0;
};

}  // namespace espalier::cuda
