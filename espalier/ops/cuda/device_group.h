// A rank group with one GPU per rank: collectives of device tensors are queued work, collectives of host tensors go to
// the host's group.
//
// A collective runs after earlier work. Later work runs after the collective; if the collective was started ahead, only
// work behind its wait() does. The host does not wait. Each group has its own queues, because ranks may reach different
// groups in different orders. Data to send is copied first and sent in a separate queue, so that no rank waits for its
// receiver.
#pragma once

#include <deque>
#include <memory>

#include "espalier/ops/cuda/collectives.h"
#include "espalier/ops/cuda/device.h"

namespace espalier::cuda {

class DeviceGroup : public Group {
 public:
  // `timeout`: seconds that a collective may run (Unfinished). Errors: DeviceError if the queues of this rank's groups
  // are more than the GPU's connections.
  DeviceGroup(std::shared_ptr<Group> host, double timeout, CudaDevice& device);

 private:
  std::unique_ptr<Pending::Work> do_start_add(const at::Tensor& x) override;
  std::unique_ptr<Pending::Work> do_start_gather(const at::Tensor& part, const at::Tensor& whole) override;
  std::unique_ptr<Pending::Work> do_start_scatter_sum(const at::Tensor& whole, const at::Tensor& part) override;
  void do_max(const at::Tensor& x) override;
  void do_exchange(const at::Tensor& send, std::span<const std::int64_t> send_rows, const at::Tensor& receive,
                   std::span<const std::int64_t> receive_rows) override;
  void do_broadcast(const at::Tensor& x, int root) override;
  void do_send(const at::Tensor& x, int to) override;
  void do_receive(const at::Tensor& x, int from) override;

  // Queues a collective after all earlier work of `queue` and of the compute queue; returns the event after it.
  Event give(Queue queue, const Collective& collective);
  // Queues a collective. Work that is queued after the wait() of the result runs after the collective.
  std::unique_ptr<Pending::Work> start(const Collective& collective);
  // The same with an immediate wait(): all later work runs after the collective.
  void run(const Collective& collective);
  // Runs a call of the host's group to its end, while this rank's queues continue.
  template <class Call>
  std::unique_ptr<Pending::Work> on_host(Call&& call);

  // A copy in flight to another rank.
  struct Sent {
    at::Tensor copy;
    Event left;
  };

  std::shared_ptr<Group> host_;
  double timeout_;
  CudaDevice& device_;
  std::unique_ptr<Communicator> communicator_;
  Queue collectives_ = make_queue(), sends_ = make_queue();
  std::deque<Sent> under_way_;
};

}  // namespace espalier::cuda
