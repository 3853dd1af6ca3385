// Collectives between the GPUs of a group's ranks, as work of queues (runtime.h): NCCL in the CUDA library, in tests
// the group of the same ranks on the host.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "espalier/ops/cuda/runtime.h"
#include "espalier/parallel/group.h"

namespace espalier::cuda {

// parallel/group.h describes it. Tensors are the device's, contiguous, and stay until it has run.
struct Collective {
  enum class Kind { sum, maximum, gather, scatter_sum, exchange, broadcast, send, receive };
  Kind kind;
  at::Tensor from, to;  // of a sum, a maximum and a broadcast the same; a send has no `to`, a receive no `from`
  int peer = 0;         // the root of a broadcast, the other rank of a send or receive
  std::vector<std::int64_t> send_rows = {}, receive_rows = {};  // of an exchange
};
const char* name_of(Collective::Kind kind);

class Communicator {
 public:
  Communicator();
  virtual ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  // Gives it to the queue. Every rank gives the collectives of a group in the same order; what one rank sends to
  // another, the other receives in that order. Errors: CommunicationError.
  virtual void give(Queue queue, const Collective& collective) = 0;
  // Calls what asks the host's group, whose ranks may wait for work of this one's queues, which goes on meanwhile.
  virtual void on_host(const std::function<void()>& call) = 0;
  // Ends what is under way and refuses what comes, so that the queues run on: other ranks are gone.
  virtual void give_up() = 0;
};

// Every rank of `host` calls it at the same place. `timeout`: seconds. Errors: CommunicationError; DeviceError where
// this library cannot.
std::unique_ptr<Communicator> join(const std::shared_ptr<Group>& host, double timeout);

// Collectives that were given to queues and are not known to have ended.
class Unfinished {
 public:
  // `begin` and `end`: the places in its queue before and behind it, forgotten here.
  void add(std::string_view name, Event begin, Event end, double timeout);
  bool empty() const { return all_.empty(); }
  // Errors: CommunicationError where one has begun and not ended for longer than its timeout; every communicator of
  // this rank gives up then, and all are dropped.
  void check();

 private:
  struct Entry {
    std::string_view name;
    Event begin, end;
    double timeout;
    double began = -1;  // seconds of a steady clock at which it was first seen to have begun
  };
  std::deque<Entry> all_;
};

// The unfinished collectives of this rank.
Unfinished& unfinished();

// Returns when the event has happened. Errors: CommunicationError where a collective does not end.
void wait_until(Event event);

}  // namespace espalier::cuda
