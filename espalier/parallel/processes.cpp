// The only file that names c10d. Traps: alltoall_base moves from its counts; a send may wait for its receive.
#include "espalier/parallel/processes.h"

#include <ATen/core/Tensor.h>
#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <functional>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "espalier/base/error.h"
#include "espalier/device/device.h"
#include "espalier/metrics/timer.h"

namespace espalier {
namespace {

using Milliseconds = std::chrono::milliseconds;
using Gloo = c10d::ProcessGroupGloo;

Milliseconds milliseconds(double seconds) { return Milliseconds(static_cast<std::int64_t>(seconds * 1000)); }

// The first line of what a library has to say, without its backtrace.
std::string first_line(const std::exception& error) {
  std::string text = error.what();
  return text.substr(0, text.find('\n'));
}

using WorkOfBackend = c10::intrusive_ptr<c10d::Work>;

// Calls a library and says who did not answer.
template <class Call>
auto called(const char* name, double timeout, Call&& call) {
  try {
    return call();
  } catch (const std::exception& error) {
    throw CommunicationError({name, text_of("an answer of every rank within ", timeout, " seconds (--comm-timeout)"),
                              first_line(error), ""});
  }
}

// Work that a backend has begun. Its future is asked for the time of its end, where it has one.
class BegunWork final : public Pending::Work {
 public:
  BegunWork(const char* name, double timeout, WorkOfBackend work)
      : name_(name), timeout_(timeout), work_(std::move(work)) {
    try {
      work_->getFuture()->addCallback([ended = ended_](c10::ivalue::Future&) { *ended = Timer::steady_seconds(); },
                                      /*uses_future=*/false);
    } catch (const std::exception&) {  // a work without one
    }
  }
  void wait() override {
    called(name_, timeout_, [&] { work_->wait(); });
  }
  double ended() const override { return *ended_; }

 private:
  const char* name_;
  double timeout_;
  WorkOfBackend work_;
  std::shared_ptr<std::atomic<double>> ended_ = std::make_shared<std::atomic<double>>(0);
};

// Some that were begun one after another, and what is done behind the last one.
class BegunWorks final : public Pending::Work {
 public:
  BegunWorks(std::vector<std::unique_ptr<Pending::Work>> works, std::function<void()> then)
      : works_(std::move(works)), then_(std::move(then)) {}
  void wait() override {
    for (const auto& work : works_) work->wait();
    if (then_) then_();
  }
  double ended() const override { return works_.back()->ended(); }

 private:
  std::vector<std::unique_ptr<Pending::Work>> works_;
  std::function<void()> then_;
};

// Gloo's gather collects everything in memory of its own before it hands it out, and its scatter of sums works on a
// copy: gathers go in pieces, of all ranks together, and sums are made in place.
constexpr std::int64_t kGatherBytes = std::int64_t{4} << 20;

// Memory that Gloo took for a piece goes back to the machine at once. By default glibc raises this bound to the largest
// block that was ever dropped; blocks below it stay with the thread that took them: tens of MiB beside the budget.
constexpr int kReturnedBytes = 256 << 10;

class ProcessGroup : public Group {
 public:
  ProcessGroup(c10::intrusive_ptr<c10d::Backend> backend, double timeout)
      : Group(backend->getRank(), backend->getSize()), backend_(std::move(backend)), timeout_(timeout) {}

 private:
  template <class Call>
  void run(const char* name, Call&& call) {
    called(name, timeout_, std::forward<Call>(call));
  }
  template <class Call>
  std::unique_ptr<Pending::Work> start(const char* name, Call&& call) {
    return std::make_unique<BegunWork>(name, timeout_, called(name, timeout_, std::forward<Call>(call)));
  }

  std::unique_ptr<Pending::Work> start_reduction(const char* name, const at::Tensor& x, c10d::ReduceOp op) {
    return start(name, [&] {
      std::vector<at::Tensor> tensors{x};
      c10d::AllreduceOptions options;
      options.reduceOp = op;
      return backend_->allreduce(tensors, options);
    });
  }

  std::unique_ptr<Pending::Work> do_start_add(const at::Tensor& x) override {
    return start_reduction("sum over ranks", x, c10d::ReduceOp::SUM);
  }
  void do_max(const at::Tensor& x) override { start_reduction("maximum over ranks", x, c10d::ReduceOp::MAX)->wait(); }

  std::unique_ptr<Pending::Work> do_start_gather(const at::Tensor& part, const at::Tensor& whole) override {
    const at::Tensor in = part.view(-1), out = whole.view(-1);
    const std::int64_t count = in.numel();
    const std::int64_t piece = std::max<std::int64_t>(1, kGatherBytes / (size() * in.element_size()));
    std::vector<std::unique_ptr<Pending::Work>> works;
    for (std::int64_t begin = 0; begin < count; begin += piece) {
      const std::int64_t elements = std::min(piece, count - begin);
      std::vector<at::Tensor> from{in.narrow(0, begin, elements)};
      std::vector<std::vector<at::Tensor>> to(1);
      for (int rank = 0; rank < size(); ++rank) to[0].push_back(out.narrow(0, rank * count + begin, elements));
      works.push_back(start("gather", [&] { return backend_->allgather(to, from); }));
    }
    return std::make_unique<BegunWorks>(std::move(works), nullptr);
  }

  std::unique_ptr<Pending::Work> do_start_scatter_sum(const at::Tensor& whole, const at::Tensor& part) override {
    std::vector<std::unique_ptr<Pending::Work>> works;
    works.push_back(start_reduction("sum and scatter", whole, c10d::ReduceOp::SUM));
    return std::make_unique<BegunWorks>(std::move(works), [whole, part, rank = rank()] {
      part.view(-1).copy_(whole.view(-1).narrow(0, rank * part.numel(), part.numel()));
    });
  }

  void do_exchange(const at::Tensor& send, std::span<const std::int64_t> send_rows, const at::Tensor& receive,
                   std::span<const std::int64_t> receive_rows) override {
    run("exchange", [&] {
      at::Tensor in = send, out = receive;
      std::vector<std::int64_t> given(send_rows.begin(), send_rows.end()),
          taken(receive_rows.begin(), receive_rows.end());
      backend_->alltoall_base(out, in, taken, given)->wait();
    });
  }

  void do_broadcast(const at::Tensor& x, int root) override {
    run("broadcast", [&] {
      std::vector<at::Tensor> tensors{x};
      c10d::BroadcastOptions options;
      options.rootRank = root;
      backend_->broadcast(tensors, options)->wait();
    });
  }

  // The receiver may be busy sending by itself: a copy waits instead of this rank.
  void do_send(const at::Tensor& x, int to) override {
    constexpr std::size_t kMostUnderWay = 16;
    run("send", [&] {
      std::vector<at::Tensor> tensors{x.clone()};
      under_way_.push_back(backend_->send(tensors, to, 0));
      if (under_way_.size() <= kMostUnderWay) return;
      under_way_.front()->wait();
      under_way_.pop_front();
    });
  }

  void do_receive(const at::Tensor& x, int from) override {
    run("receive", [&] {
      std::vector<at::Tensor> tensors{x};
      backend_->recv(tensors, from, 0)->wait();
    });
  }

  c10::intrusive_ptr<c10d::Backend> backend_;
  double timeout_;
  std::deque<WorkOfBackend> under_way_;
};

c10::intrusive_ptr<c10d::Store> meeting_place(const Launch& launch, double timeout) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(launch.port);
  options.isServer = !launch.served && launch.rank == 0;
  options.waitWorkers = false;
  options.timeout = milliseconds(timeout);
  const char* libuv = std::getenv("USE_LIBUV");
  options.useLibUV = libuv == nullptr || std::string_view(libuv) != "0";
  auto store = c10::make_intrusive<c10d::TCPStore>(launch.host, options);
  // torchrun's store outlives a restart, and what the processes before it left there.
  return c10::make_intrusive<c10d::PrefixStore>(text_of("espalier/", launch.restarts), std::move(store));
}

auto network_device(const Launch& launch) {
  if (const char* name = std::getenv("GLOO_SOCKET_IFNAME"); name != nullptr && *name != '\0')
    return Gloo::createDeviceForInterface(
        std::string(std::string_view(name).substr(0, std::string_view(name).find(','))));
  if (launch.local_ranks == launch.ranks) return Gloo::createDeviceForHostname("127.0.0.1");
  return Gloo::createDefaultDevice();
}

// The library that carries the collectives of a group. Gloo: of tensors in the host's memory.
class Backends {
 public:
  Backends(const Launch& launch, double timeout) : device_(network_device(launch)), timeout_(timeout) {}

  c10::intrusive_ptr<c10d::Backend> make(c10::intrusive_ptr<c10d::Store> store, int rank, int size) const {
    auto options = Gloo::Options::create(milliseconds(timeout_));
    options->devices.push_back(device_);
    options->threads = 1;
    return c10::make_intrusive<Gloo>(std::move(store), rank, size, options);
  }

 private:
  decltype(network_device(Launch{})) device_;
  double timeout_;
};

}  // namespace

struct Processes::State {
  Launch launch;
  double timeout;
  c10::intrusive_ptr<c10d::Store> store;
  std::unique_ptr<OwnedMesh> mesh;
  bool failed = false;

  bool has_failed(int rank) { return store->check({"failed/" + std::to_string(rank)}); }
  // Where this process serves the meeting place: the others must still find out who failed first.
  void wait_for_others() {
    constexpr int kTries = 100;
    if (launch.served || launch.rank != 0) return;
    for (int tries = 0, rank = 1; rank < launch.ranks && tries < kTries; ++tries) {
      while (rank < launch.ranks && has_failed(rank)) ++rank;
      std::this_thread::sleep_for(Milliseconds(50));
    }
  }
};

Processes::Processes(const Launch& launch, double timeout) : state_(std::make_unique<State>()) {
#ifdef M_MMAP_THRESHOLD
  mallopt(M_MMAP_THRESHOLD, kReturnedBytes);
#endif
  state_->launch = launch;
  state_->timeout = timeout;
  try {
    state_->store = meeting_place(launch, std::max(timeout, kStart));
  } catch (const std::exception& error) {
    throw CommunicationError({text_of(launch.host, ':', launch.port),
                              text_of("the rendezvous of ", launch.ranks, " ranks"), first_line(error),
                              "are MASTER_ADDR and MASTER_PORT those of rank 0?"});
  }
}

Processes::~Processes() {
  state_->mesh.reset();
  try {
    if (state_->failed) state_->wait_for_others();
  } catch (const std::exception&) {  // nobody is there to be waited for
  }
}

const Mesh& Processes::connect(const Degrees& degrees) {
  State& state = *state_;
  const Launch& launch = state.launch;
  const double timeout = state.timeout;
  try {
    const Backends backends(launch, timeout);
    state.mesh = std::make_unique<OwnedMesh>(launch.rank, degrees, [&](const GroupKey& key) {
      const std::vector<int>& ranks = key.ranks;
      std::string name = key.connection == Connection::weights ? "weights" : "rows";
      for (const int rank : ranks) name += text_of('/', rank);
      const int place = static_cast<int>(std::find(ranks.begin(), ranks.end(), launch.rank) - ranks.begin());
      auto store = c10::make_intrusive<c10d::PrefixStore>(name, state.store);
      auto backend = backends.make(std::move(store), place, static_cast<int>(ranks.size()));
      return bound_device().connect(std::make_shared<ProcessGroup>(std::move(backend), timeout), timeout);
    });
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw CommunicationError(
        {"start", text_of("an answer of all ", launch.ranks, " ranks within ", timeout, " seconds (--comm-timeout)"),
         first_line(error), ""});
  }
  Mesh& mesh = state.mesh->mesh();
  mesh.local_ranks = launch.local_ranks;
  mesh.run = launch.run;
  return mesh;
}

std::string Processes::told_by_rank_0(const std::string& what, const std::function<std::string()>& make) {
  State& state = *state_;
  const double timeout = std::max(state.timeout, kStart);
  if (state.launch.rank == 0) {
    const std::string text = make();
    state.store->set(what, std::vector<std::uint8_t>(text.begin(), text.end()));
    return text;
  }
  try {
    const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout);
    while (!state.store->check({what}) && !state.has_failed(0) && std::chrono::steady_clock::now() < until)
      std::this_thread::sleep_for(Milliseconds(20));
    if (state.store->check({what})) {
      const std::vector<std::uint8_t> bytes = state.store->get(what);
      return {bytes.begin(), bytes.end()};
    }
  } catch (const std::exception&) {  // the meeting place is gone with the rank that made it
  }
  throw CommunicationError(
      {what, text_of("an answer of rank 0 within ", timeout, " seconds (--comm-timeout)"), "no answer", ""});
}

bool Processes::is_first_to_fail() {
  state_->failed = true;
  bool is_first = true;
  try {
    const std::string own = std::to_string(state_->launch.rank);
    const std::vector<std::uint8_t> bytes(own.begin(), own.end());
    state_->store->set("failed/" + own, bytes);
    is_first = state_->store->compareSet("failed", {}, bytes) == bytes;
  } catch (const std::exception&) {
    // the meeting place is gone with the rank that made it
  }
  // Ranks that wait for this one in a collective fail now, while the meeting place is there, and come second.
  state_->mesh.reset();
  return is_first;
}

std::string Processes::silent_ranks() {
  constexpr Milliseconds kPatience{500};
  std::string out;
  try {
    std::this_thread::sleep_for(kPatience);
    for (int rank = 0; rank < state_->launch.ranks; ++rank)
      if (!state_->has_failed(rank)) out += text_of(out.empty() ? "rank " : ", ", rank);
  } catch (const std::exception&) {
  }
  return out;
}

}  // namespace espalier
