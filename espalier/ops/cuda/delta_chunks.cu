// The chunked delta rule on the host: passes over key heads, and sums of chunks. Heads do not meet, so that how many a
// pass has changes no bit.
#include "espalier/ops/cuda/delta_chunks.h"

#include <algorithm>

#include "espalier/ops/cuda/columns.h"
#include "espalier/ops/cuda/delta_passes.h"

namespace espalier::cuda {
namespace {

std::int64_t pass_bytes = kMostPassBytes;

ChunkNumbers numbers_of(const DeltaRuns<float>& runs) {
  ChunkNumbers numbers{};
  for (std::int64_t r = 0; r < runs.count; ++r)
    numbers.first[r + 1] =
        numbers.first[r] + std::max<std::int64_t>(1, ceil_div(runs.of[r].end - runs.of[r].begin, kChunkRows));
  return numbers;
}

ChunkPass pass_of(const DeltaShape& s, std::int64_t chunks, std::int64_t key_heads) {
  ChunkPass pass;
  pass.chunks = chunks, pass.key_heads = key_heads, pass.each = s.value_heads / s.key_heads;
  pass.heads = key_heads * pass.each;
  pass.channels = s.decays > 1;
  pass.blocks = ceil_div(s.value_dim, kValueBlock), pass.width = s.key_dim <= 64 ? 64 : kMostChunkKeys;
  return pass;
}

// Calls body(pass) for all key heads, with memory for as many at a time as have room.
template <class Body>
void for_each_pass(const DeltaShape& s, std::int64_t chunks, ChunkUse use, Body body) {
  // mixers/recurrence/gpu_work.h counts what is taken here.
  ChunkPass one_head = pass_of(s, chunks, 1);
  const std::int64_t of_head = set_places(one_head, use, nullptr);
  const std::int64_t at_once = std::clamp<std::int64_t>(pass_bytes / of_head, 1, s.key_heads);
  const Scratch<unsigned char> tiles(at_once * of_head);
  for (std::int64_t first = 0; first < s.key_heads; first += at_once) {
    ChunkPass pass = pass_of(s, chunks, std::min(at_once, s.key_heads - first));
    pass.first_head = first;
    set_places(pass, use, tiles.get());
    body(pass);
  }
}

}  // namespace

bool fits_chunks(const DeltaShape& s) { return s.key_dim <= kMostChunkKeys && s.value_dim <= kMostChunkValues; }

void set_pass_bytes(std::int64_t bytes) { pass_bytes = bytes; }

void chunked_delta_rule(const DeltaShape& shape, const DeltaWeights<bfloat16>& weights, const DeltaRuns<float>& runs,
                        bfloat16* o_TV) {
  const ChunkNumbers numbers = numbers_of(runs);
  const ChunkUse use = o_TV != nullptr ? ChunkUse::outputs : ChunkUse::states;
  for_each_pass(shape, numbers.first[runs.count], use, [&](ChunkPass& pass) {
    pass.ends = true;
    chunk_rows(shape, weights, runs, numbers, pass);
    if (pass.channels) channel_pairs(pass);
    prepare_chunks(shape, runs, numbers, pass, nullptr);
    scan_chunks(shape, runs, numbers, pass);
    if (o_TV != nullptr) chunk_outputs(shape, weights, runs, numbers, pass, o_TV);
  });
  store_inputs(shape, weights, runs);
}

void add_chunked_backward(const DeltaShape& shape, const DeltaWeights<bfloat16>& weights, const DeltaRuns<float>& runs,
                          const bfloat16* grad_o_TV, bfloat16* grad_projected_TW, const DeltaSums<float>& sums) {
  const std::int64_t C = shape.channels, H = shape.value_heads, of_conv = C * shape.kernel, decays = H * shape.decays,
                     state = H * shape.key_dim * shape.value_dim + (shape.kernel - 1) * C;
  const ChunkNumbers numbers = numbers_of(runs);
  const std::int64_t chunks = numbers.first[runs.count];
  const Scratch<float> part(chunks * (of_conv + C + 2 * H + decays)), states(runs.count * state);
  float* const conv = part.get();
  const ChunkSums of_chunks{conv, conv + chunks * of_conv, conv + chunks * (of_conv + C),
                            conv + chunks * (of_conv + C + H), conv + chunks * (of_conv + C + H + decays)};
  for_each_pass(shape, chunks, ChunkUse::gradients, [&](const ChunkPass& pass) {
    chunk_rows(shape, weights, runs, numbers, pass);
    if (pass.channels) channel_pairs(pass);
    prepare_chunks(shape, runs, numbers, pass, grad_o_TV);
    scan_chunks(shape, runs, numbers, pass);
    scan_chunks_backward(shape, runs, numbers, pass, grad_o_TV, states.get());
    (pass.channels ? channel_gradients : chunk_gradients)(shape, runs, numbers, pass, grad_o_TV);
    chunk_rows_backward(shape, weights, runs, numbers, pass, grad_o_TV, grad_projected_TW, of_chunks, states.get());
  });
  for (std::int64_t r = 0; r < runs.count; ++r) {
    const std::int64_t before = numbers.first[r], count = numbers.first[r + 1] - before;
    const auto add = [&](std::int64_t width, const float* from, float* to) {
      if (to != nullptr) add_parts(count, width, from + before * width, to);
    };
    add(of_conv, of_chunks.conv, sums.conv_CK);
    add(C, of_chunks.bias, sums.conv_bias_C);
    add(H, of_chunks.a_log, sums.a_log_H);
    add(decays, of_chunks.dt_bias, sums.dt_bias_H);
    add(H, of_chunks.skip, sums.skip_H);
    if (runs.of[r].grad_start != nullptr) add_parts(1, state, states.get() + r * state, runs.of[r].grad_start);
  }
}

}  // namespace espalier::cuda
