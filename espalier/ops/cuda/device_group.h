// A group of ranks, each with a GPU: collectives of the device's tensors are work of queues, those of the host's are
// the host's group's.
//
// A collective runs behind the work that was given before it and before the work that is given next, and the host does
// not wait. Each group has its queues, as ranks may come to different groups in different orders. Data to send is
// copied first and sent in a queue of its own, so that no rank waits for its receiver.
#pragma once

#include <deque>
#include <memory>

#include "espalier/ops/cuda/collectives.h"
#include "espalier/ops/cuda/device.h"

namespace espalier::cuda {

class DeviceGroup : public Group {
 public:
  // `timeout`: seconds that a collective may take from its begin.
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

  // Behind the work given so far; the place in the queue behind it.
  Event give(Queue queue, const Collective& collective);
  // Before the work that is given once it was waited for, or next, too.
  std::unique_ptr<Pending::Work> start(const Collective& collective);
  void run(const Collective& collective);
  // Runs a call of the host's group while this rank's queues go on.
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
