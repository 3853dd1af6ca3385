// Collectives of emulated GPUs: work of their streams that the host's group of the same ranks does meanwhile.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>

#include <chrono>
#include <set>
#include <thread>

#include "espalier/ops/cuda/collectives.h"
#include "tests/cuda/emulated_streams.h"

namespace espalier::cuda {
namespace {

using Kind = Collective::Kind;

// The same memory, which may go before it is read: nothing of it is held.
at::Tensor seen(const at::Tensor& x) {
  return x.defined() ? at::from_blob(x.data_ptr(), x.sizes(), x.options()) : at::Tensor();
}

void run(Group& host, const Collective& c) {
  switch (c.kind) {
    case Kind::sum:
      return host.add_over_ranks(c.to);
    case Kind::maximum:
      return host.max_over_ranks(c.to);
    case Kind::gather:
      return host.gather(c.from, c.to);
    case Kind::scatter_sum:
      return host.scatter_sum(c.from, c.to);
    case Kind::exchange:
      return host.exchange(c.from, c.send_rows, c.to, c.receive_rows);
    case Kind::broadcast:
      return host.broadcast(c.to, c.peer);
    case Kind::send:
      return host.send(c.from, c.peer);
    case Kind::receive:
      return host.receive(c.to, c.peer);
  }
}

class HostCommunicator final : public Communicator {
 public:
  explicit HostCommunicator(std::shared_ptr<Group> host) : host_(std::move(host)) {}

  void give(Queue queue, const Collective& collective) override {
    queues_.insert(queue);
    Collective there = collective;
    there.from = seen(collective.from), there.to = seen(collective.to);
    const bool in_place = collective.from.is_same(collective.to);
    const auto here = std::make_shared<Collective>(there);
    testing::streams().give(queue, testing::Remote{[=] {
                                                     if (there.from.defined()) here->from = there.from.clone();
                                                     if (there.to.defined())
                                                       here->to = in_place ? here->from : at::empty_like(there.to);
                                                   },
                                                   [host = host_, here] { run(*host, *here); },
                                                   [=] {
                                                     if (there.to.defined()) there.to.copy_(here->to);
                                                   }});
  }

  // The work of its own queues comes first; the others go on.
  void on_host(const std::function<void()>& call) override {
    testing::EmulatedStreams& streams = testing::streams();
    for (const Queue queue : queues_) {
      const Event all = streams.record(queue);
      streams.run_until(all);
      streams.forget(all);
    }
    std::future<void> done = std::async(std::launch::async, call);
    while (done.wait_for(std::chrono::seconds(0)) != std::future_status::ready)
      if (streams.idle() || !streams.step()) std::this_thread::sleep_for(std::chrono::microseconds(20));
    done.get();
  }

  // The host's group ends by itself.
  void give_up() override {}

 private:
  std::shared_ptr<Group> host_;
  std::set<Queue> queues_;
};

}  // namespace

std::unique_ptr<Communicator> join(const std::shared_ptr<Group>& host, double) {
  return std::make_unique<HostCommunicator>(host);
}

}  // namespace espalier::cuda
