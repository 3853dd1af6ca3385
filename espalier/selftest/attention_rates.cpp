#include "espalier/selftest/attention_rates.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/clamp_max.h>

#include <algorithm>

#include "espalier/selftest/timed_calls.h"

namespace espalier {
namespace {

constexpr std::int64_t kMostParts = 256;  // the smallest rows are this part of a shape's
constexpr double kLongEnough = 5e-3;      // seconds of a forward with fewer rows

// Heads of Llama-3-8B and Qwen3-8B but where others are named.
const AttentionRate kShapes[] = {
    {"a wave behind a path", 32, 8, 128, 128, 16384, 10240, 2048},
    {"a prompt", 32, 8, 128, 128, 10240, 0, 10240},
    {"a dense sequence", 32, 8, 128, 128, 12288, 0, 12288},
    {"heads of 64", 64, 8, 64, 64, 16384, 8192, 2048},
    {"heads of 192, values of 128 (DeepSeek)", 16, 16, 192, 128, 8192, 8192, 2048},
    {"heads of 256 (Qwen3.5)", 16, 2, 256, 256, 8192, 8192, 2048},
};

struct Calls {
  TimedCall forward, backward;
};

Calls calls_of(const TimedRoom& room, const AttentionRate& of) {
  const std::int64_t H = of.heads, J = of.kv_heads, D = of.head_dim, V = of.value_dim, T = of.rows, P = of.path_rows;
  const at::Tensor ends =
      at::clamp_max((at::arange(T, at::kLong).floor_divide(of.branch_rows) + 1) * of.branch_rows, T);
  const AttentionProblem problem{D,
                                 room.values({T, H * D}),
                                 room.values({T, J * D}),
                                 room.values({T, J * V}),
                                 room.values({P, J * D}),
                                 room.values({P, J * V}),
                                 at::Tensor(),
                                 room.whole(ends)};
  const at::Tensor out = room.values({T, H * V}), lse = room.sums({H, T}), grad = room.values({T, H * V});
  const AttentionGradients to{room.values({T, H * D}), room.sums({T, J * D}), room.sums({T, J * V}),
                              room.sums({P, J * D}), room.sums({P, J * V})};
  return {{[=, &room] { room.ops().attention(problem, out, lse); }},
          {[=, &room] { room.ops().add_attention_backward(problem, out, lse, grad, to); }}};
}

AttentionRate part_of(const AttentionRate& shape, std::int64_t parts) {
  AttentionRate part = shape;
  part.rows /= parts, part.path_rows /= parts, part.branch_rows = std::max<std::int64_t>(part.branch_rows / parts, 1);
  return part;
}

}  // namespace

double AttentionRate::pairs() const {
  const auto d = [](std::int64_t count) { return static_cast<double>(count); };
  double own = 0;
  for (std::int64_t begin = 0; begin < rows; begin += branch_rows) {
    const std::int64_t branch = std::min(branch_rows, rows - begin);
    own += d(branch) * d(branch + 1) / 2;
  }
  return d(rows) * d(path_rows) + own;
}
double AttentionRate::forward_flops() const {
  return 2 * static_cast<double>(heads * (head_dim + value_dim)) * pairs();
}
// Scores, dL/dq and dL/dk over head_dim, dL/dp and dL/dv over value_dim.
double AttentionRate::backward_flops() const {
  return 2 * static_cast<double>(heads * (3 * head_dim + 2 * value_dim)) * pairs();
}

std::vector<AttentionRate> measure_attention_rates(Device& device, Progress& progress) {
  const TimedRoom room(device, DType::bfloat16);
  std::vector<AttentionRate> rates;
  progress.begin("attention rates", std::size(kShapes), "shapes");
  std::int64_t parts = kMostParts;
  while (parts > 1 && seconds_of(device, calls_of(room, part_of(kShapes[0], parts)).forward, 1) < kLongEnough)
    parts /= 4;
  for (const AttentionRate& shape : kShapes) {
    AttentionRate rate = part_of(shape, parts);
    const Calls calls = calls_of(room, rate);
    rate.forward_seconds = steady_seconds_of(device, calls.forward, 1);
    rate.backward_seconds = steady_seconds_of(device, calls.backward, 1);
    rates.push_back(rate);
    progress.advance_to(static_cast<std::int64_t>(rates.size()));
  }
  progress.end();
  return rates;
}

}  // namespace espalier
