// Collectives between the GPUs of a rank group, queued as work (runtime.h): NCCL in the CUDA library, in tests the host
// group of the same ranks.
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

// The calls are described in parallel/group.h. Tensors are on the device, contiguous, and must exist until it has run.
struct Collective {
  enum class Kind { sum, maximum, gather, scatter_sum, exchange, broadcast, send, receive };
  Kind kind;
  at::Tensor from, to;  // equal for a sum, a maximum and a broadcast; a send has no `to`, a receive no `from`
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
  // Queues the collective. Every rank queues the collectives of a group in the same order; sends between two ranks are
  // received in order. Errors: CommunicationError.
  virtual void give(Queue queue, const Collective& collective) = 0;
  // Runs a call of the host's group, whose ranks may wait for this rank's queues; the queues continue meanwhile.
  virtual void on_host(const std::function<void()>& call) = 0;
  // Cancels running collectives and refuses new ones, so that the queues continue after other ranks have died.
  virtual void give_up() = 0;
};

// Every rank of `host` calls it at the same place. `timeout`: seconds. Errors: CommunicationError; DeviceError if this
// library has no collectives.
std::unique_ptr<Communicator> join(const std::shared_ptr<Group>& host, double timeout);

// Queued collectives that are not known to have ended.
class Unfinished {
 public:
  // `begin` and `end`: the events before and after it in its queue; this object forgets them.
  void add(Collective::Kind kind, Event begin, Event end, double timeout);
  bool empty() const { return all_.empty(); }
  bool has_sends_alone() const;
  // Errors: CommunicationError if a collective has run for longer than its timeout; every communicator of this rank
  // then gives up, and all collectives are dropped.
  void check();

 private:
  struct Entry {
    Collective::Kind kind;
    Event begin, end;
    double timeout;
    double began = -1;  // when it was first seen running, by a steady clock
  };
  std::deque<Entry> all_;
};

// The unfinished collectives of this rank.
Unfinished& unfinished();

// Sleeps until it is worth to look again at something that has not happened after these seconds: for an eighth of
// them, at least 20 microseconds and at most a millisecond, so that the ranks of a machine that has few processors
// leave them to those that compute.
void pause_after(double seconds);

// Returns when all collectives of this rank have ended. Errors: as wait_until().
void wait_for_collectives();
// The same without sends: the receiver may come to one only after further calls of this host.
void wait_for_all_but_sends();

// Returns when the event has happened. Errors: CommunicationError if a collective does not end.
void wait_until(Event event);

}  // namespace espalier::cuda
