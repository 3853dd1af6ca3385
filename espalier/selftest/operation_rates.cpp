#include "espalier/selftest/operation_rates.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>

#include "espalier/base/error.h"
#include "espalier/device/scalar_type.h"
#include "espalier/ops/operations.h"
#include "espalier/selftest/operation_check.h"
#include "espalier/selftest/timed_calls.h"

namespace espalier {
namespace {

// Sizes of one layer, and of the head.
constexpr std::int64_t kWidth = 2048, kInner = 6144, kHeads = 16, kKvHeads = 4, kHeadDim = 128, kVocabulary = 32768;
constexpr std::int64_t kFewest = 64, kMost = 16384;
constexpr double kLongEnough = 5e-3;  // seconds

struct Timed {
  const char* operation;
  TimedCall (*of)(const TimedRoom& room, std::int64_t rows);
};

double d(std::int64_t count) { return static_cast<double>(count); }

TimedCall norm(const TimedRoom& room, std::int64_t R) {
  const at::Tensor x = room.values({R, kWidth}), y = room.values({R, kWidth}), w = room.values({kWidth}),
                   rstd = room.sums({R});
  return {[=, &room] { room.ops().norm(x, w, 1e-6, y, rstd); }, 2 * room.size() * d(R * kWidth)};
}
TimedCall norm_backward(const TimedRoom& room, std::int64_t R) {
  const at::Tensor x = room.values({R, kWidth}), y = room.values({R, kWidth}), w = room.values({kWidth}),
                   stream = room.values({R, kWidth}), rstd = room.sums({R}), grad = room.sums({kWidth});
  return {[=, &room] { room.ops().add_norm_backward(x, w, rstd, y, stream, grad); }, 4 * room.size() * d(R * kWidth)};
}
TimedCall rotate(const TimedRoom& room, std::int64_t R) {
  const std::int64_t width = kHeads * kHeadDim;
  const Rotation rotation{
      {room.sums({R, kHeadDim / 2}), room.sums({R, kHeadDim / 2})}, room.places(R, 1), room.values({kHeadDim}), 1e-6};
  const at::Tensor in = room.values({R, width}), out = room.values({R, width});
  return {[=, &room] { room.ops().rotate(rotation, in, out); }, 2 * room.size() * d(R * width)};
}
TimedCall swiglu(const TimedRoom& room, std::int64_t R) {
  const at::Tensor both = room.values({R, 2 * kInner}), act = room.values({R, kInner});
  return {[=, &room] { room.ops().swiglu({}, both, act); }, 3 * room.size() * d(R * kInner)};
}
TimedCall swiglu_backward(const TimedRoom& room, std::int64_t R) {
  const at::Tensor both = room.values({R, 2 * kInner}), act = room.values({R, kInner});
  return {[=, &room] { room.ops().swiglu_backward({}, both, act, both, act); }, 6 * room.size() * d(R * kInner)};
}
TimedCall convert(const TimedRoom& room, std::int64_t R) {
  const at::Tensor from = room.values({R, kWidth}), to = room.values({R, kWidth});
  return {[=, &room] { room.ops().convert(from, to); }, 2 * room.size() * d(R * kWidth)};
}
TimedCall linear(const TimedRoom& room, std::int64_t R) {
  const at::Tensor x = room.values({R, kWidth}), w = room.values({kWidth, kWidth}), y = room.values({R, kWidth});
  return {[=, &room] { room.ops().linear(y, x, w, at::Tensor()); }, room.size() * d(2 * R * kWidth + kWidth * kWidth),
          2 * d(R * kWidth) * d(kWidth)};
}
TimedCall linear_grad_weight(const TimedRoom& room, std::int64_t R) {
  const at::Tensor x = room.values({R, kWidth}), g = room.values({R, kWidth}), w = room.sums({kWidth, kWidth}),
                   product = room.values({kWidth, kWidth});
  return {[=, &room] { room.ops().add_linear_grad_weight(w, at::Tensor(), g, x, product); },
          room.size() * d(2 * R * kWidth) + 8 * d(kWidth * kWidth), 2 * d(R * kWidth) * d(kWidth)};
}

// Half the rows are a path, the others causal behind it; products of one pair: 2 H D operations.
struct Attended {
  AttentionProblem problem;
  at::Tensor out, lse;
  double pairs;
};
Attended attended(const TimedRoom& room, std::int64_t R) {
  const std::int64_t own = R / 2, kv = kKvHeads * kHeadDim;
  const at::Tensor own_k = room.values({own, kv}), path_k = room.values({R - own, kv});
  return {
      {kHeadDim, room.values({own, kHeads * kHeadDim}), own_k, own_k, path_k, path_k, at::Tensor(), room.all(own, own)},
      room.values({own, kHeads * kHeadDim}),
      room.sums({kHeads, own}),
      d(own) * d(R - own) + d(own) * d(own + 1) / 2};
}
TimedCall attention(const TimedRoom& room, std::int64_t R) {
  const Attended a = attended(room, R);
  return {[=, &room] { room.ops().attention(a.problem, a.out, a.lse); }, 0, 4 * d(kHeads * kHeadDim) * a.pairs};
}
TimedCall attention_backward(const TimedRoom& room, std::int64_t R) {
  const Attended a = attended(room, R);
  const std::int64_t own = a.out.size(0), kv = kKvHeads * kHeadDim;
  const AttentionGradients to{room.values({own, kHeads * kHeadDim}), room.sums({own, kv}), room.sums({own, kv}),
                              room.sums({R - own, kv}), room.sums({R - own, kv})};
  return {[=, &room] { room.ops().add_attention_backward(a.problem, a.out, a.lse, a.out, to); }, 0,
          10 * d(kHeads * kHeadDim) * a.pairs};
}

struct Logits {
  EdgeBlock edges;
  LogitSums sums;
  at::Tensor logits, of_edges;
};
Logits logits_of(const TimedRoom& room, std::int64_t R) {
  return {{room.numbers({R}), room.places(R + 1, 1), room.places(R, 1)},
          {room.numbers({R}), room.numbers({R}), room.numbers({R})},
          room.sums({R, kVocabulary}),
          room.numbers({R})};
}
TimedCall logit_sums(const TimedRoom& room, std::int64_t R) {
  const Logits a = logits_of(room, R);
  return {[=, &room] { room.ops().logit_sums(a.edges, 0, a.logits, a.sums, a.of_edges); },
          static_cast<double>(a.logits.nbytes())};
}
TimedCall logit_gradients(const TimedRoom& room, std::int64_t R) {
  const Logits a = logits_of(room, R);
  return {[=, &room] { room.ops().logit_gradients(a.edges, 0, a.sums, a.of_edges, a.of_edges, a.logits); },
          2 * static_cast<double>(a.logits.nbytes())};
}
TimedCall adamw(const TimedRoom& room, std::int64_t R) {
  const std::int64_t n = R * kWidth;
  const at::Tensor p = room.sums({n}), grad = room.sums({n}), m = room.sums({n}), v = room.sums({n});
  const at::Tensor rounded = room.size() == 2 ? room.values({n}) : at::Tensor();
  const double sum = static_cast<double>(p.element_size());
  return {[=, &room] { room.ops().adamw(p, grad, m, v, AdamWStep{}, rounded); },
          d(n) * (7 * sum + (rounded.defined() ? 2 : 0))};
}

// A layer of Qwen3.5: runs of 2,048 rows. Each row reads a state, adds to it and reads it again: three products with a
// state, and eight in the backward.
constexpr RecurrenceShape kRecurrence{
    .key_heads = 16, .value_heads = 32, .key_dim = 128, .value_dim = 128, .kernel = 4};
constexpr std::int64_t kRunRows = 2048;

struct Recurrence {
  DeltaRuleProblem problem;
  std::vector<StateRun> runs;
  at::Tensor out;
};
Recurrence recurrence(const TimedRoom& room, std::int64_t R) {
  Recurrence of{{kRecurrence,
                 room.values({R, kRecurrence.projected()}),
                 room.values({kRecurrence.channels(), kRecurrence.kernel}),
                 room.values({kRecurrence.value_heads}),
                 room.values({kRecurrence.value_heads}),
                 {},
                 {},
                 {}},
                {},
                room.values({R, kRecurrence.value_width()})};
  for (std::int64_t begin = 0; begin < R; begin += kRunRows) {
    StateRun& run = of.runs.emplace_back();
    run.begin = begin, run.end = std::min(begin + kRunRows, R);
  }
  return of;
}
double products_of_states(std::int64_t R, int products) { return 2.0 * products * d(R * kRecurrence.matrix()); }
TimedCall delta_rule(const TimedRoom& room, std::int64_t R) {
  return {[a = recurrence(room, R), &room]() mutable {
            a.problem.runs = a.runs;
            room.ops().delta_rule(a.problem, a.out);
          },
          0, products_of_states(R, 3)};
}
TimedCall delta_rule_backward(const TimedRoom& room, std::int64_t R) {
  const DeltaRuleGradients to{room.values({R, kRecurrence.projected()}), {}, {}, {}, {}, {}};
  return {[a = recurrence(room, R), to, &room]() mutable {
            a.problem.runs = a.runs;
            room.ops().add_delta_rule_backward(a.problem, a.out, to);
          },
          0, products_of_states(R, 8)};
}

constexpr Timed kTimed[] = {{"norm", norm},
                            {"add_norm_backward", norm_backward},
                            {"rotate", rotate},
                            {"swiglu", swiglu},
                            {"swiglu_backward", swiglu_backward},
                            {"convert", convert},
                            {"linear", linear},
                            {"add_linear_grad_weight", linear_grad_weight},
                            {"attention", attention},
                            {"add_attention_backward", attention_backward},
                            {"delta_rule", delta_rule},
                            {"add_delta_rule_backward", delta_rule_backward},
                            {"logit_sums", logit_sums},
                            {"logit_gradients", logit_gradients},
                            {"adamw", adamw}};

OperationRate rate_of(Device& device, const TimedRoom& room, const Timed& timed, std::int64_t most) {
  for (std::int64_t rows = kFewest;; rows *= 2) {
    const TimedCall work = timed.of(room, rows);
    if (2 * rows <= most && seconds_of(device, work, 1) < kLongEnough) continue;
    return {timed.operation, rows, work.bytes, work.flops, steady_seconds_of(device, work, 3)};
  }
}

const OperationRate& named(const std::vector<OperationRate>& rates, std::string_view operation) {
  const auto found = std::ranges::find(rates, operation, &OperationRate::operation);
  ESPALIER_INTERNAL(found != rates.end(), operation);
  return *found;
}

}  // namespace

std::vector<OperationRate> measure_operation_rates(Device& device, DType dtype, Progress& progress) {
  const TimedRoom room(device, dtype);
  std::vector<OperationRate> rates;
  progress.begin("rates", std::size(kTimed), "operations");
  for (const Timed& timed : kTimed) {
    rates.push_back(rate_of(device, room, timed, kMost));
    progress.advance_to(static_cast<std::int64_t>(rates.size()));
  }
  progress.end();
  return rates;
}

double product_flops_per_second(Device& device, DType dtype, std::int64_t rows) {
  const TimedRoom room(device, dtype);
  const TimedCall product = linear(room, rows);
  return product.flops / steady_seconds_of(device, product, 3);
}

MachineProfile profile_of_rates(Device& device, DType dtype, const std::vector<OperationRate>& rates) {
  const TimedRoom room(device, dtype);
  MachineProfile profile;
  profile.name = device.name();
  profile.source = "measured";
  profile.device = device.in_host_memory() ? "cpu" : "cuda";
  profile.dtype = dtype;
  profile.threads = at::get_num_threads();
  double best = 0;
  for (std::int64_t rows = 1; rows <= named(rates, "linear").rows; rows *= 4) {
    best = std::max(best, product_flops_per_second(device, dtype, rows));  // more rows are not slower
    profile.matrix.push_back({rows, best});
  }
  profile.weight_gradient_flops_per_second = named(rates, "add_linear_grad_weight").flops_per_second();
  // A CPU multiplies the head in the accumulator dtype.
  if (const DType sums = dtype == DType::float64 ? dtype : DType::float32; device.in_host_memory()) {
    const TimedRoom accumulators(device, sums);
    const TimedCall head = linear(accumulators, MachineProfile::kHeadRows);
    profile.head_flops_per_second = head.flops / seconds_of(device, head, 3);
  }
  // Forward and backward together, as the cost model has it: operations of both over the seconds of both, per pair.
  const OperationRate &forward = named(rates, "attention"), &backward = named(rates, "add_attention_backward");
  profile.attention_flops_per_second = 3.5 / (1 / forward.flops_per_second() + 2.5 / backward.flops_per_second());
  profile.bytes_per_second = named(rates, "convert").bytes_per_second();
  const at::Tensor one = room.values({1, 8});
  profile.seconds_per_call = seconds_of(device, {[&] { room.ops().zero(one); }}, 10);
  profile.memory_bytes = device.free_bytes();
  return profile;
}

}  // namespace espalier
