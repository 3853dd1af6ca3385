// The host code of a GPU on streams that run late and out of step (emulated_runtime.h): right under every order, and
// each deliberate fault of host_faults.py noticed. Every run is a process of its own, which a fault may end.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <iostream>
#include <limits>
#include <optional>

#include "espalier/device/arena.h"
#include "espalier/device/control_block.h"
#include "espalier/device/host_values.h"
#include "espalier/objective/fused_head.h"
#include "espalier/ops/cuda/runtime.h"
#include "espalier/optimizer/adamw.h"
#include "tests/cuda/emulated_runtime.h"
#include "tests/equivalence/fixture.h"
#include "tests/mutation/faults.h"
#include "tests/support/in_process.h"

namespace espalier::testing {

void PrintTo(const Fault& fault, std::ostream* out) { *out << fault.meaning; }

namespace {

constexpr unsigned kSeeds = 20;
// Processes that are forked have one thread.
const bool kBound = (at::set_num_threads(1), bind_device(streamed_device()), true);

Device& device() { return streamed_device(); }
const Operations& ops() { return device().operations(); }
at::Tensor numbers(double first, std::int64_t count = 5) {
  return at::arange(static_cast<double>(count), at::kDouble) + first;
}
at::Tensor numbers_there(double first, std::int64_t count = 5) { return device().adopt(numbers(first, count)); }

void expect(bool right) {
  if (!right) throw std::runtime_error("wrong");
}
void expect_values(const at::Tensor& there, const at::Tensor& want) { expect(device().to_host(there).equal(want)); }

// Many values handed over one after another: blocks are staged in again, from tensors that are gone by then.
void hand_over() {
  std::vector<at::Tensor> there;
  for (int i = 0; i < 6; ++i) there.push_back(numbers_there(10 * i));
  for (int i = 0; i < 6; ++i) expect_values(there[static_cast<std::size_t>(i)], numbers(10 * i));
}

// Results of work, of a tensor written again behind the copy; and work done when the device says so.
void bring_back() {
  const at::Tensor x = device().allocate({5}, at::kDouble), y = numbers_there(3);
  ops().convert(y, x);
  expect_values(x, numbers(3));
  ops().zero(x);
  expect_values(x, at::zeros({5}, at::kDouble));
  bool ran = false;
  give_to_compute([&ran] { ran = true; });
  device().synchronize();
  expect(ran);
  const Device::Moment begin = device().moment();
  ops().zero(x);
  expect(device().seconds_between(begin, device().moment()) >= 0);
}

// Ranges of an arena that sleep between others in use, that are stored and fetched, and pages that move.
void sleep_and_wake() {
  const std::int64_t page = cuda::page_bytes(), most = 12 * page;
  Arena arena(most, device(), 2);
  const auto take = [&](std::int64_t bytes) { return arena.take({bytes / 8}, at::kDouble); };
  const auto fill = [&](const at::Tensor& x, double value) {
    ops().convert(device().adopt(at::full_like(x, value, at::TensorOptions())), x);
  };
  const auto filled = [&](const at::Tensor& x, double value) {
    expect_values(x, at::full({x.size(0)}, value, at::kDouble));
  };
  const at::Tensor before = take(page / 2 + 64);
  fill(before, 1);
  const std::int64_t begin = arena.in_use();
  const at::Tensor sleeper = take(3 * page);
  fill(sleeper, 2);
  const Arena::Range range{begin, arena.in_use()};
  const at::Tensor behind = take(page / 2 + 64);
  fill(behind, 3);
  std::byte* const stored = device().take_host_memory(range.bytes());
  arena.copy_out(range, stored);
  expect(*reinterpret_cast<double*>(stored) == 2 && *reinterpret_cast<double*>(stored + range.bytes() - 8) == 2);
  fill(sleeper, 9);  // still under way when its pages go
  arena.sleep(range);
  const at::Tensor other = take(2 * page);  // takes those pages
  fill(other, 4);
  arena.wake(range);
  arena.copy_in(stored, range);
  for (std::int64_t i = 0; i < range.bytes(); ++i) stored[i] = std::byte{0xff};  // the room is somebody else's
  filled(before, 1);
  filled(sleeper, 2);
  filled(behind, 3);
  filled(other, 4);
  fill(sleeper, 5);
  arena.sleep(range);  // and comes back to its place at once
  arena.wake(range);
  std::fill_n(reinterpret_cast<double*>(stored), range.bytes() / 8, 6.0);
  arena.copy_in(stored, range);
  filled(sleeper, 6);
  filled(behind, 3);
  fill(behind, 7);  // the arena goes while this is under way
  device().give_back_host_memory(stored, range.bytes());
}

// A gradient of a small model whose trunks are offloaded; the norm of an update.
Case stored_trunks() {
  Case c;
  c.rollouts = ragged_rollouts();
  c.options.schedule = "phased", c.options.trunk_state = "offload", c.options.token_budget = 9;
  return c;
}
at::Tensor step() { return run_case(stored_trunks()).gradient; }

double norm() {
  const auto state = tiny_model("qwen3", DType::float64, 1);
  AdamW optimizer(state->table, state->weights, {}, device());
  return optimizer.step(device().adopt(at::ones(state->weights.sizes(), at::kDouble))).grad_norm;
}

// The gradients of a head of three blocks and their log-probs, each of which the host has while the next is computed.
std::vector<at::Tensor> head(Device& there) {
  constexpr std::int64_t kOutputs = 600, kWidth = 3, kVocabulary = 7;
  const auto values = [](at::IntArrayRef sizes) {
    return at::sin(at::arange(static_cast<double>(c10::multiply_integers(sizes)), at::kDouble)).view(sizes);
  };
  std::vector<HeadEdge> edges;
  for (std::int32_t o = 0; o < kOutputs; ++o) edges.push_back({o, o % static_cast<std::int32_t>(kVocabulary)});
  HeadEdges handed_over;
  ControlBlock block;
  handed_over.add_to(block, std::vector<double>(kOutputs, 0.9), edges, kVocabulary);
  block.hand_over(there);
  const HeadGradients out{there.adopt(at::zeros({kOutputs, kWidth}, at::kDouble)),
                          there.adopt(at::zeros({kVocabulary, kWidth}, at::kDouble))};
  const at::Tensor log_probs = at::zeros({kOutputs}, at::kDouble);
  Arena arena(std::int64_t{1} << 20, there);
  add_head_forward_backward(
      {there.adopt(values({kOutputs, kWidth})), there.adopt(values({kVocabulary, kWidth})), handed_over},
      [&](std::size_t first, std::span<const double> logprob, std::span<const double>, std::span<double> by_logprob,
          std::span<double> by_entropy) {
        std::ranges::copy(logprob, host_values<double>(log_probs).begin() + static_cast<std::ptrdiff_t>(first));
        std::ranges::copy(logprob, by_logprob.begin());
        std::ranges::fill(by_entropy, 0.5);
      },
      out, arena);
  return {log_probs, there.to_host(out.grad_hidden_OM), there.to_host(out.grad_weight_VM)};
}

// Pages that are wanted elsewhere while a sum is under way, and while what was sent cannot have left; and an arena that
// goes while a sum is under way.
void move_pages(Device& mine, Group& other) {
  const std::int64_t page = cuda::page_bytes();
  const at::Tensor x = mine.adopt(numbers(1)), y = mine.allocate({5}, at::kDouble);
  Arena arena(6 * page, mine, 2);
  const auto take = [&] { return arena.take({page / 8}, at::kDouble); };
  for (const bool sends : {false, true}) {
    const std::int64_t begin = arena.in_use();
    const at::Tensor sleeper = take();
    mine.operations().zero(sleeper);
    const Arena::Range range{begin, arena.in_use()};
    arena.sleep(range);
    sends ? other.send(x, 1 - other.rank()) : other.add_over_ranks(x);
    mine.operations().zero(take());
    if (sends) other.receive(y, 1 - other.rank());
    arena.wake(range);
  }
  expect_values(y, 2 * numbers(1));
  const std::int64_t begin = arena.in_use();
  mine.operations().zero(take());
  arena.sleep({begin, arena.in_use()});
  other.add_over_ranks(x);
}

// A page that is wanted elsewhere while what was sent can leave: where memory is short, no further page is taken.
void move_last_page(Device& mine, Group& other) {
  const std::int64_t page = cuda::page_bytes();
  const at::Tensor x = mine.adopt(numbers(1)), y = mine.allocate({5}, at::kDouble);
  Arena arena(3 * page, mine, 2);
  const auto take = [&] { return arena.take({page / 8}, at::kDouble); };
  mine.operations().zero(take());
  arena.sleep({0, arena.in_use()});
  other.rank() == 0 ? other.send(x, 1) : other.receive(y, 0);
  set_free_memory(page);
  const std::int64_t held = cuda::held_memory();
  mine.operations().zero(take());
  expect(cuda::held_memory() < held + page);
  set_free_memory(std::numeric_limits<std::int64_t>::max());
  if (other.rank() == 1) expect_values(y, numbers(1));
}

// Sums of what was just computed, and what is sent from one rank to the other and written over.
void meet_others() {
  constexpr Degrees kTwo{.dp = 2};
  run_ranks(kTwo,
            [](const Mesh& mesh) {
              Device& mine = bound_device();
              Group& other = mesh.world;
              const int rank = other.rank();
              const at::Tensor x = mine.allocate({5}, at::kDouble), y = mine.allocate({5}, at::kDouble);
              const auto fill = [&](const at::Tensor& to, double first) {
                mine.operations().convert(mine.adopt(numbers(first)), to);
              };
              for (int i = 0; i < 3; ++i) {
                fill(x, rank + i);
                other.add_over_ranks(x);
                mine.operations().convert(x, y);
                expect(mine.to_host(y).equal(numbers(i) + numbers(i + 1)));
                fill(x, 10 * rank + i);
                other.send(x, 1 - rank);
                fill(x, -1);
                other.receive(y, 1 - rank);
                expect(mine.to_host(y).equal(numbers(10 * (1 - rank) + i)));
              }
              // A result larger than the room that was taken before, while what was sent cannot have left.
              constexpr std::int64_t kMany = 300000;
              const at::Tensor many = numbers_there(rank, kMany);
              other.send(x, 1 - rank);
              expect_values(many, numbers(rank, kMany));
              other.receive(y, 1 - rank);
              std::byte* const stored = mine.take_host_memory(64);
              other.send(x, 1 - rank);
              other.receive(y, 1 - rank);
              mine.give_back_host_memory(stored, 64);
              move_pages(mine, other);
              move_last_page(mine, other);
              other.wait_for_all();  // as a program ends: what was sent leaves
            },
            {.timeout = 30});
}

struct Right {
  at::Tensor gradient = step();
  double grad_norm = norm();
  std::vector<at::Tensor> of_head = head(cpu_device());
};

// True if a process of its own ends well: with this fault on, if any, and the streams in this order.
bool runs_well(const Fault* fault, unsigned seed, const Right& right) {
  const pid_t child = fork();
  if (child == 0) {
    (void)!freopen("/dev/null", "w", stderr);
    std::optional<SwitchedOn> on;
    if (fault != nullptr) on.emplace(*fault);
    int code = 1;
    // torch makes its thread pool anew in the first call after a fork, which must not be that of two ranks at once.
    at::set_num_threads(at::get_num_threads());
    try {
      set_stream_seed(seed);
      hand_over();
      bring_back();
      sleep_and_wake();
      meet_others();
      const std::vector<at::Tensor> of_head = head(device());
      for (std::size_t i = 0; i < of_head.size(); ++i) expect(of_head[i].equal(right.of_head[i]));
      expect(step().equal(right.gradient) && norm() == right.grad_norm);
      code = 0;
    } catch (const std::exception&) {
    }
    _exit(code);
  }
  int status = 0;
  return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

class HostFaults : public ::testing::Test {
 protected:
  static const Right& right() {
    static const Right once;
    return once;
  }
};

TEST_F(HostFaults, WithoutOneEveryOrderOfTheStreamsIsRight) {
  for (unsigned seed = 0; seed < kSeeds; ++seed) EXPECT_TRUE(runs_well(nullptr, seed, right())) << "seed " << seed;
}

class EachHostFault : public HostFaults, public ::testing::WithParamInterface<Fault> {};

TEST_P(EachHostFault, IsNoticed) {
  unsigned noticed = 0;
  for (unsigned seed = 0; seed < kSeeds; ++seed) noticed += runs_well(&GetParam(), seed, right()) ? 0 : 1;
  EXPECT_GT(noticed, 0u) << GetParam().meaning;
  std::cout << "    noticed under " << noticed << " of " << kSeeds << " orders\n";
}

INSTANTIATE_TEST_SUITE_P(All, EachHostFault, ::testing::ValuesIn(all_faults()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace espalier::testing
