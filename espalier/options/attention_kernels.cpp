#include "espalier/options/attention_kernels.h"

#include <algorithm>
#include <bit>
#include <iterator>

#include "espalier/base/error.h"

namespace espalier {
namespace {

constexpr std::int64_t kElement = 2, kSum = 4;         // bfloat16, and what it is summed in
constexpr int kBlackwell = 100;                        // ten times its compute capability
constexpr std::int64_t kMostMultiprocessors = 148;     // of GPUs so far
constexpr std::int64_t kMostSquaresOfFewestRows = 64;  // in a graph of cuDNN, however few rows there are

constexpr AttentionKernelsRow kRows[] = {
#define ESPALIER_ROW(name, word, what, ...) {__VA_ARGS__},
    ESPALIER_ATTENTION_KERNELS(ESPALIER_ROW)
#undef ESPALIER_ROW
};

std::int64_t gradient_bytes(const AttentionHeads& of, std::int64_t queries, std::int64_t keys) {
  return (queries * of.heads + 2 * keys * of.kv_heads) * of.head_dim * kElement;
}

}  // namespace

const AttentionKernelsRow& row_of(AttentionKernels kernels) {
  ESPALIER_INTERNAL(kernels != AttentionKernels::automatic, "kernels that are not chosen yet");
  return kRows[static_cast<std::size_t>(kernels) - 1];
}

std::vector<AttentionKernels> tried_in_order() {
  std::vector<AttentionKernels> tried;
  for (std::size_t each = 0; each < std::size(kRows); ++each)
    if (kRows[each].tried > 0) tried.push_back(static_cast<AttentionKernels>(each + 1));
  std::ranges::sort(tried, {}, [](AttentionKernels kernels) { return row_of(kernels).tried; });
  return tried;
}

bool AttentionKernelsRow::run_on(int gpu_capability) const {
  return capability == 0 || gpu_capability == capability ||
         (gpu_capability >= kBlackwell && gpu_capability <= and_newer);
}

std::string AttentionKernelsRow::reason_against(const AttentionHeads& heads, int gpu_capability) const {
  if (!composed) return "";
  if (heads.soft_cap > 0) return "soft caps";
  if (heads.value_dim != heads.head_dim) return "values of another size than keys";
  const std::int64_t largest = gpu_capability >= kBlackwell ? largest_head_newer : largest_head;
  if (heads.head_dim % head_multiple != 0 || heads.head_dim > largest)
    return text_of("heads of ", heads.head_dim, " elements");
  return heads.window > 0 ? "windows" : "";
}

std::int64_t AttentionKernelsRow::backward_rows(bool pairs) const {
  return pairs && ordered_rows > 0 ? ordered_rows : std::numeric_limits<std::int64_t>::max();
}

std::int64_t flash_backward_bytes(const LibraryBackward& call) {
  const AttentionHeads& of = call.of;
  const std::int64_t keys = std::max(call.rows, call.path_rows), width = of.heads * of.head_dim;
  const std::int64_t splits = call.deterministic ? (kMostMultiprocessors + of.heads - 1) / of.heads : 1;
  const std::int64_t expanded = of.heads == of.kv_heads ? 0 : 2 * keys * width * kElement;
  return gradient_bytes(of, call.rows, keys) + splits * call.rows * width * kSum + call.rows * of.heads * kSum +
         expanded;
}

std::int64_t cudnn_backward_bytes(const LibraryBackward& call) {
  const AttentionKernelsRow& row = row_of(AttentionKernels::cudnn);
  const AttentionHeads& of = call.of;
  const bool keeps_pairs = call.deterministic && !call.adds_in_turn;
  const auto bytes = [&](std::int64_t own, std::int64_t keys, std::int64_t padded_rows, std::int64_t padded_keys,
                         std::int64_t pairs) {
    return gradient_bytes(of, own, keys) +
           cudnn_workspace_bytes(of.heads, of.head_dim, padded_rows, padded_keys, pairs, keeps_pairs);
  };
  const std::int64_t most_pairs = row.ordered_rows * row.ordered_rows;
  std::int64_t square = std::max(4 * call.rows, kMostSquaresOfFewestRows * row.fewest_rows);
  if (keeps_pairs) square = std::min(square, most_pairs / row.fewest_rows);
  const auto side = [&](std::int64_t rows) { return std::min(rows, row.backward_rows(keeps_pairs)); };
  const auto padded = [&](std::int64_t rows) {
    return std::max(row.fewest_rows, static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(rows))));
  };
  const std::int64_t queries = padded(side(call.rows)), keys = padded(side(call.path_rows));
  return std::max(bytes(call.rows, call.rows, square, square, most_pairs),
                  bytes(side(call.rows), side(call.path_rows), queries, keys, queries * keys));
}

std::int64_t cudnn_workspace_bytes(std::int64_t heads, std::int64_t head_dim, std::int64_t queries, std::int64_t keys,
                                   std::int64_t pairs, bool keeps_pairs) {
  const std::int64_t of_queries = keeps_pairs ? pairs * kElement : queries * head_dim * kSum;
  return heads * (of_queries + queries * kSum + 2 * keys * head_dim * kElement);
}

}  // namespace espalier
