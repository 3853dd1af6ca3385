// The host code of a GPU down to its calls of CUDA and NCCL, which a recorder takes (recorder.h): the rules of events,
// memory, pages and communicators hold, and each deliberate fault of call_faults.py is noticed.
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <optional>

#include "espalier/base/error.h"
#include "espalier/device/arena.h"
#include "espalier/device/cuda_library.h"
#include "espalier/ops/cpu/operations.h"
#include "espalier/ops/cuda/aten.h"
#include "espalier/ops/cuda/chunk_trial.h"
#include "espalier/ops/cuda/collectives.h"
#include "espalier/ops/cuda/cudnn_attention.h"
#include "espalier/ops/cuda/device.h"
#include "espalier/ops/cuda/launch.h"
#include "espalier/ops/cuda/open_attention.h"
#include "espalier/ops/cuda/operations.h"
#include "tests/cuda/calls/nccl_stand_in.h"
#include "tests/cuda/calls/recorder.h"
#include "tests/mutation/faults.h"

extern "C" {
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  properties->major = 9;
  return cudaSuccess;
}
}

extern "C" espalier::OpenCudaDevice espalier_open_gpu;

// The part of ATen and of the kernels that library.cpp opens.
namespace espalier::cuda {

const std::string& open_aten(int) {
  static const std::string none;
  auto& recorder = testing::Recorder::one();
  recorder.expect(recorder.calls("cudaSetDevice") == 0, "libtorch_cuda is opened when CUDA runs already");
  recorder.called("open_aten");
  return none;
}
const Operations& operations() { return cpu::operations(); }
int chunk_trials = 0;
std::string try_chunks(Device&) {
  ++chunk_trials;
  return "states differ";
}
bool opened_deterministic = true;
AttentionOperations open_own_attention(const AttentionGpu&) { return cpu::operations(); }
AttentionOperations open_flash_attention(const AttentionGpu& gpu) {
  opened_deterministic = gpu.deterministic;
  return cpu::operations();
}
AttentionOperations open_cudnn_attention(const AttentionGpu& gpu) { return open_flash_attention(gpu); }
AttentionOperations open_hopper_attention(const AttentionGpu&) { return cpu::operations(); }
AttentionOperations open_hopper_split_attention(const AttentionGpu&) { return cpu::operations(); }

}  // namespace espalier::cuda

namespace espalier::testing {

void PrintTo(const Fault& fault, std::ostream* out) { *out << fault.meaning; }

namespace {

Recorder& recorder() { return Recorder::one(); }

void expect(bool right) {
  if (!right) throw std::runtime_error("wrong");
}
at::Tensor numbers(double first, std::int64_t count = 5) {
  return at::arange(static_cast<double>(count), at::kDouble) + first;
}
void expect_values(Device& device, const at::Tensor& there, const at::Tensor& want) {
  expect(device.to_host(there).equal(want));
}
// Work of the compute stream.
void move(const at::Tensor& from, const at::Tensor& to) {
  cuda::copy_on_device(to.data_ptr(), from.data_ptr(), from.nbytes());
}

// Values to the device and back, again and again through the same blocks; scratch that goes while work uses it.
void hand_over(Device& device) {
  std::vector<at::Tensor> there;
  for (int i = 0; i < 6; ++i) there.push_back(device.adopt(numbers(10 * i)));
  for (int i = 0; i < 6; ++i) expect_values(device, there[static_cast<std::size_t>(i)], numbers(10 * i));
  const at::Tensor x = device.allocate({5}, at::kDouble);
  move(there[3], x);
  const Device::Coming coming = device.start_to_host(x);
  cuda::fill_zero(there[3].data_ptr(), there[3].nbytes());
  there.clear();
  expect(device.arrived(coming).equal(numbers(30)));
  const Device::Moment begin = device.moment();
  cuda::fill_zero(x.data_ptr(), x.nbytes());
  expect(device.seconds_between(begin, device.moment()) > 0);
  const at::Tensor wide = device.adopt(at::arange(24, at::kDouble).view({4, 6}));
  expect_values(device, wide.narrow(1, 2, 3), at::arange(24, at::kDouble).view({4, 6}).narrow(1, 2, 3));
}

// Pages that sleep, are stored, move and come back.
void sleep_and_wake(Device& device) {
  const std::int64_t page = cuda::page_bytes();
  Arena arena(4 * page, device, 2);
  const auto take = [&] { return arena.take({page / 8}, at::kDouble); };
  const at::Tensor first = take();
  move(device.adopt(numbers(1)), first);
  const std::int64_t begin = arena.in_use();
  const at::Tensor sleeper = take();
  cuda::fill_zero(sleeper.data_ptr(), sleeper.nbytes());
  move(device.adopt(numbers(2)), sleeper);
  const Arena::Range range{begin, arena.in_use()};
  std::byte* const stored = device.take_host_memory(range.bytes());
  arena.copy_out(range, stored);
  expect(reinterpret_cast<double*>(stored)[4] == 6);
  arena.sleep(range);
  const at::Tensor other = take();  // that page
  move(device.adopt(numbers(3)), other);
  arena.wake(range);
  arena.copy_in(stored, range);
  expect_values(device, sleeper.narrow(0, 0, 5), numbers(2));
  expect_values(device, other.narrow(0, 0, 5), numbers(3));
  expect_values(device, first.narrow(0, 0, 5), numbers(1));
  arena.sleep(range);  // and comes back to its place at once
  arena.wake(range);
  arena.copy_in(stored, range);
  expect_values(device, sleeper.narrow(0, 0, 5), numbers(2));
  device.give_back_host_memory(stored, range.bytes());
}

// The host's side of a group of two, as the first of them sees it.
class FirstOfTwo final : public Group {
 public:
  FirstOfTwo() : Group(0, 2) {}

 private:
  [[noreturn]] static void fail() { throw std::runtime_error("a collective of the host"); }
  std::unique_ptr<Pending::Work> do_start_add(const at::Tensor&) override { fail(); }
  std::unique_ptr<Pending::Work> do_start_gather(const at::Tensor&, const at::Tensor&) override { fail(); }
  std::unique_ptr<Pending::Work> do_start_scatter_sum(const at::Tensor&, const at::Tensor&) override { fail(); }
  void do_max(const at::Tensor&) override { fail(); }
  void do_exchange(const at::Tensor&, std::span<const std::int64_t>, const at::Tensor&,
                   std::span<const std::int64_t>) override {
    fail();
  }
  void do_broadcast(const at::Tensor&, int) override {}
  void do_send(const at::Tensor&, int) override { fail(); }
  void do_receive(const at::Tensor&, int) override { fail(); }
};

void meet_others(Device& device) {
  const std::shared_ptr<Group> group = device.connect(std::make_shared<FirstOfTwo>(), 30);
  const at::Tensor x = device.adopt(numbers(1)), y = device.allocate({5}, at::kDouble),
                   both = device.allocate({10}, at::kDouble);
  for (int i = 0; i < 3; ++i) {
    move(device.adopt(numbers(i)), x);
    group->add_over_ranks(x);
    move(x, y);
    expect_values(device, y, numbers(i));
    Pending gather = group->start_gather(x, both);
    cuda::fill_zero(y.data_ptr(), y.nbytes());
    gather.wait();
    group->scatter_sum(both, y);
    group->send(x, 1);
    cuda::fill_zero(x.data_ptr(), x.nbytes());
    group->receive(y, 1);
    group->max_over_ranks(y);
    group->broadcast(y, 0);
  }
  // Pinned memory while a collective may run, and when all have ended.
  const at::Tensor many = device.adopt(numbers(7, 300000));
  group->send(x, 1);
  expect_values(device, many, numbers(7, 300000));
  device.synchronize();
  std::byte* const memory = device.take_host_memory(64);
  device.give_back_host_memory(memory, 64);
}

// True if the work fails for this reason.
template <class Error, class Work>
bool fails(const Work& work, std::string_view reason) {
  try {
    work();
  } catch (const Error& error) {
    return std::string_view(error.what()).find(reason) != std::string_view::npos;
  }
  return false;
}

void meet_refusals(Device& device) {
  const std::shared_ptr<Group> group = device.connect(std::make_shared<FirstOfTwo>(), 30);
  const at::Tensor x = device.adopt(numbers(1));
  const auto sum = [&] { group->add_over_ranks(x); };
  recorder().refuses = true;
  expect(fails<CommunicationError>(sum, "NCCL: "));
  recorder().refuses = false;
  expect(!recorder().is_in_group());
  expect(fails<CommunicationError>(sum, "an earlier collective that failed"));
}

void run_all() {
  OpenedGpu opened;
  std::string problem;
  Device* const device =
      espalier_open_gpu({.attention = AttentionKernels::flash, .deterministic = false}, &opened, &problem);
  expect(device != nullptr && recorder().calls("open_aten") == 1);
  expect(opened.attention == AttentionKernels::flash && !cuda::opened_deterministic);
  expect(cuda::chunk_trials == 0);  // a model without recurrent layers does without
  for (int model = 0; model < 2; ++model) expect(device->operations().without_chunks() == "states differ");
  expect(cuda::chunk_trials == 1);
  hand_over(*device);
  sleep_and_wake(*device);
  meet_others(*device);
  meet_refusals(*device);
}

void listen_to_nccl(int version = 0) {
  void* const library = dlopen(ESPALIER_NCCL_STAND_IN, RTLD_NOW | RTLD_GLOBAL);
  ASSERT_NE(library, nullptr) << dlerror();
  const NcclListener listener{
      [](const char* name) { recorder().called(name); },
      [] { return recorder().make_communicator(); },
      [](int change) { recorder().group(change); },
      [] { recorder().call_done(); },
      [](void* communicator, bool finalizes) { recorder().end_communicator(communicator, finalizes); },
      [](void* communicator, cudaStream_t stream, const void* from, std::size_t from_bytes, void* to,
         std::size_t to_bytes) {
        if (recorder().refuses) return false;
        recorder().collective(communicator, stream, from, from_bytes, to, to_bytes);
        return true;
      },
      version};
  reinterpret_cast<void (*)(const NcclListener*)>(dlsym(library, "espalier_listen"))(&listener);
}

// Ranks meet while libnccl.so.2 is an older one.
void meet_with_older_nccl() {
  listen_to_nccl(20000);
  OpenedGpu opened;
  std::string problem;
  Device* const device = espalier_open_gpu({}, &opened, &problem);
  expect(device != nullptr);
  expect(fails<DeviceError>([&] { device->connect(std::make_shared<FirstOfTwo>(), 30); }, "version 2.0.0"));
}

// Runs a process of its own, with this fault on if any. Returns the first violation, or that results were wrong.
std::string noticed(const Fault* fault, bool with_older_nccl = false) {
  int ends[2];
  expect(pipe(ends) == 0);
  const pid_t child = fork();
  if (child == 0) {
    std::optional<SwitchedOn> on;
    if (fault != nullptr) on.emplace(*fault);
    std::string said;
    try {
      if (with_older_nccl) {
        meet_with_older_nccl();
      } else {
        listen_to_nccl();
        run_all();
        for (const char* const call :
             {"cudaEventElapsedTime", "cudaEventQuery", "cudaMemcpy2DAsync", "cudaFreeAsync", "cuMemUnmap",
              "cuMemRelease", "cudaFreeHost", "cudaMemsetAsync", "ncclAllReduce", "ncclAllGather", "ncclReduceScatter",
              "ncclBroadcast", "ncclSend", "ncclRecv", "ncclCommDestroy", "ncclCommAbort", "open_aten"})
          if (recorder().calls(call) == 0) said = std::string(call) + " was not called";
      }
    } catch (const std::exception& error) {
      said = error.what();
    }
    if (!recorder().violations().empty()) said = recorder().violations().front();
    said.resize(std::min<std::size_t>(said.size(), 500));
    (void)!write(ends[1], said.data(), said.size());
    _exit(0);
  }
  close(ends[1]);
  std::string said(500, ' ');
  const ssize_t bytes = read(ends[0], said.data(), said.size());
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  said.resize(static_cast<std::size_t>(std::max<ssize_t>(bytes, 0)));
  return WIFEXITED(status) ? said : "the process ended";
}

TEST(CudaCalls, KeepTheRules) { EXPECT_EQ(noticed(nullptr), ""); }
TEST(CudaCalls, AnOlderNcclIsRefused) { EXPECT_EQ(noticed(nullptr, true), ""); }

class EachCallFault : public ::testing::TestWithParam<Fault> {};

TEST_P(EachCallFault, IsNoticed) {
  std::string said = noticed(&GetParam());
  if (said.empty()) said = noticed(&GetParam(), true);
  EXPECT_NE(said, "") << GetParam().meaning;
  std::cout << "    " << said << "\n";
}

INSTANTIATE_TEST_SUITE_P(All, EachCallFault, ::testing::ValuesIn(all_faults()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace espalier::testing
