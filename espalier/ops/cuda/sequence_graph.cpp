#include "espalier/ops/cuda/sequence_graph.h"

#include <algorithm>
#include <bit>

namespace espalier::cuda {

std::int64_t size_class(std::int64_t rows, std::int64_t least) {
  return std::max(least, static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(rows))));
}

bool can_add_in_turn(std::size_t cudnn_version, int capability) {
  constexpr std::size_t kFirst = 92500;
  constexpr int kHopper = 9;
  return cudnn_version >= kFirst && capability == kHopper;
}

std::vector<OperandPlace> places_of(const SequenceGraph& g) {
  const std::int64_t H = g.query_heads, J = g.key_heads, D = g.head_size;
  const auto place = [&](Operand operand, bool written, bool of_queries, std::int64_t heads, std::int64_t size,
                         std::int64_t row) -> OperandPlace {
    const std::int64_t rows = of_queries ? g.queries : g.keys;
    return {operand, written, of_queries, {g.sequences, heads, rows, size}, {rows * row, size, row, 1}};
  };
  std::vector<OperandPlace> places{
      place(Operand::q, false, true, H, D, g.q_row), place(Operand::k, false, false, J, D, g.k_row),
      place(Operand::v, false, false, J, D, g.v_row), place(Operand::out, !g.backward, true, H, D, g.out_row),
      place(Operand::stats, !g.backward, true, H, 1, H)};
  if (g.backward) {
    places.push_back(place(Operand::grad_out, false, true, H, D, g.grad_out_row));
    places.push_back(place(Operand::grad_q, true, true, H, D, H * D));
    places.push_back(place(Operand::grad_k, true, false, J, D, J * D));
    places.push_back(place(Operand::grad_v, true, false, J, D, J * D));
  }
  return places;
}

}  // namespace espalier::cuda
