// A rank group with one GPU per rank: collectives of device tensors are queued work, collectives of host tensors go to
// the host's group.
//
// A collective runs after earlier work and before later work, and the host does not wait. Each group has its own
// queues, because ranks may reach different groups in different orders. Data to send is copied first and sent in a
// separate queue, so that no rank waits for its receiver.
#pragma once

#include <deque>
#include <memory>

#include "espalier/ops/cuda/collectives.h"
#include "espalier/ops/cuda/device.h"

namespace espalier::cuda {

class DeviceGroup : public Group {
 public:
  // `timeout`: seconds from the begin of a collective.
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

  // Queues a collective after all earlier work; returns the event after it.
  Event give(Queue queue, const Collective& collective);
  // Starts a collective; work given after its wait, or the next work too, runs after it.
  std::unique_ptr<Pending::Work> start(const Collective& collective);
  void run(const Collective& collective);
  // Runs a call of the host's group while this rank's queues continue.
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
