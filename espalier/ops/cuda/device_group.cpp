#include "espalier/ops/cuda/device_group.h"

#include "espalier/base/error.h"
#include "espalier/ops/cuda/launch.h"

namespace espalier::cuda {

using Kind = Collective::Kind;

DeviceGroup::DeviceGroup(std::shared_ptr<Group> host, double timeout, CudaDevice& device)
    : Group(host->rank(), host->size()),
      host_(std::move(host)),
      timeout_(timeout),
      device_(device),
      communicator_(join(host_, timeout)) {
  if (static_cast<int>(sends_) < connections()) return;
  throw DeviceError({"CUDA_DEVICE_MAX_CONNECTIONS",
                     text_of("a connection for each queue of a rank's groups, up to ", kMostConnections),
                     text_of(connections()),
                     "remove it from the environment: the program sets the most where it is absent"});
}

Event DeviceGroup::give(Queue queue, const Collective& collective) {
  const Event computed = cuda::record(Queue::compute);
  wait(queue, computed);
  forget(computed);
  const Event begin = cuda::record(queue);
  communicator_->give(queue, collective);
  unfinished().add(collective.kind, begin, cuda::record(queue), timeout_);
  return cuda::record(queue);
}

namespace {

// A collective of the host's, which has ended; one of the device's, behind which the compute queue waits.
class Ended final : public Pending::Work {
 public:
  void wait() override {}
};
class InQueue final : public Pending::Work {
 public:
  explicit InQueue(Event done) : done_(done) {}
  void wait() override {
    cuda::wait(Queue::compute, done_);
    forget(done_);
  }

 private:
  Event done_;
};

}  // namespace

std::unique_ptr<Pending::Work> DeviceGroup::start(const Collective& collective) {
  return std::make_unique<InQueue>(give(collectives_, collective));
}

void DeviceGroup::run(const Collective& collective) { start(collective)->wait(); }

template <class Call>
std::unique_ptr<Pending::Work> DeviceGroup::on_host(Call&& call) {
  communicator_->on_host(call);
  return std::make_unique<Ended>();
}

std::unique_ptr<Pending::Work> DeviceGroup::do_start_add(const at::Tensor& x) {
  if (!device_.holds(x)) return on_host([&] { host_->add_over_ranks(x); });
  return start({Kind::sum, x, x});
}

std::unique_ptr<Pending::Work> DeviceGroup::do_start_gather(const at::Tensor& part, const at::Tensor& whole) {
  if (!device_.holds(part)) return on_host([&] { host_->gather(part, whole); });
  return start({Kind::gather, part, whole});
}

std::unique_ptr<Pending::Work> DeviceGroup::do_start_scatter_sum(const at::Tensor& whole, const at::Tensor& part) {
  if (!device_.holds(whole)) return on_host([&] { host_->scatter_sum(whole, part); });
  return start({Kind::scatter_sum, whole, part});
}

void DeviceGroup::do_max(const at::Tensor& x) {
  device_.holds(x) ? run({Kind::maximum, x, x}) : communicator_->on_host([&] { host_->max_over_ranks(x); });
}

void DeviceGroup::do_exchange(const at::Tensor& send, std::span<const std::int64_t> send_rows,
                              const at::Tensor& receive, std::span<const std::int64_t> receive_rows) {
  if (!device_.holds(send))
    return communicator_->on_host([&] { host_->exchange(send, send_rows, receive, receive_rows); });
  run({Kind::exchange,
       send,
       receive,
       0,
       {send_rows.begin(), send_rows.end()},
       {receive_rows.begin(), receive_rows.end()}});
}

void DeviceGroup::do_broadcast(const at::Tensor& x, int root) {
  device_.holds(x) ? run({Kind::broadcast, x, x, root}) : communicator_->on_host([&] { host_->broadcast(x, root); });
}

// The copy is given back when it has left: in the order of the compute queue, which does not wait for that.
void DeviceGroup::do_send(const at::Tensor& x, int to) {
  if (!device_.holds(x)) return communicator_->on_host([&] { host_->send(x, to); });
  constexpr std::size_t kMostUnderWay = 16;
  while (!under_way_.empty() && (under_way_.size() >= kMostUnderWay || happened(under_way_.front().left))) {
    wait_until(under_way_.front().left);
    forget(under_way_.front().left);
    under_way_.pop_front();
  }
  const at::Tensor copy = device_.allocate(x.sizes(), x.scalar_type());
  copy_on_device(copy.data_ptr(), x.data_ptr(), x.nbytes());
  under_way_.push_back({copy, give(sends_, {Kind::send, copy, {}, to})});
}

void DeviceGroup::do_receive(const at::Tensor& x, int from) {
  device_.holds(x) ? run({Kind::receive, {}, x, from}) : communicator_->on_host([&] { host_->receive(x, from); });
}

}  // namespace espalier::cuda
