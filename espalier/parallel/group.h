// A rank group: the ranks that share one axis of a run, as processes, or as threads in tests. Callers see only
// collectives, not whether threads or a communication library implement them.
//
// Every rank of a group calls the same collectives in the same order, with equal dtypes and, except in exchange, equal
// shapes. Tensors are contiguous. A group of one rank leaves sums as they are and copies inputs to outputs; it counts
// and logs nothing.
// Errors: CommunicationError if another rank has died, calls something else, or is silent for --comm-timeout.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "espalier/parallel/traffic_log.h"

namespace espalier {

// A started collective. Until wait() has returned, its inputs must not be written and its outputs must not be read. The
// tensors must outlive it.
class [[nodiscard]] Pending {
 public:
  // The implementation's side.
  class Work {
   public:
    virtual ~Work() = default;
    virtual void wait() = 0;                    // Errors: CommunicationError
    virtual double ended() const { return 0; }  // Timer::steady_seconds, after the wait; 0: unknown
  };

  Pending() = default;  // no collective
  explicit Pending(std::unique_ptr<Work> work, std::shared_ptr<CollectiveEvent> event = nullptr)
      : work_(std::move(work)), event_(std::move(event)) {}
  Pending(Pending&&) noexcept = default;
  Pending& operator=(Pending&& other) noexcept;
  ~Pending() { drop(); }  // waits; an error is lost then

  void wait();  // Errors: CommunicationError
  std::unique_ptr<Work> take_work() && { return std::move(work_); }

 private:
  void drop() noexcept;

  std::unique_ptr<Work> work_;
  std::shared_ptr<CollectiveEvent> event_;
};

class Group {
 public:
  Group(int rank, int size) : rank_(rank), size_(size) {}
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  virtual ~Group() = default;

  int rank() const { return rank_; }
  int size() const { return size_; }

  // x <- sum of x over ranks, bitwise identical on all of them.
  void add_over_ranks(const at::Tensor& x);
  // x <- element-wise maximum over ranks.
  void max_over_ranks(const at::Tensor& x);
  // whole <- the parts end to end in rank order; whole has size() times the elements of part.
  void gather(const at::Tensor& part, const at::Tensor& whole);
  // part <- part number rank() of the sum of the wholes, cut into size() equal parts. The content of `whole` is lost.
  void scatter_sum(const at::Tensor& whole, const at::Tensor& part);
  // The same without waiting: the collective runs beside this rank's own work. Collectives of a group run in the order
  // they were started, blocking or not; each is bitwise identical to its blocking form. `of`: the name of the data, for
  // the log.
  Pending start_add(const at::Tensor& x, std::string of = {});
  Pending start_gather(const at::Tensor& part, const at::Tensor& whole, std::string of = {});
  Pending start_scatter_sum(const at::Tensor& whole, const at::Tensor& part, std::string of = {});
  // Rows (along dimension 0) of `send` go to ranks 0, 1, ... in turn, send_rows[r] to rank r; `receive` gets rows of
  // rank 0, 1, ... in turn. Counts may be 0 and must agree between sender and receiver.
  void exchange(const at::Tensor& send, std::span<const std::int64_t> send_rows, const at::Tensor& receive,
                std::span<const std::int64_t> receive_rows);
  // x <- x of rank `root`.
  void broadcast(const at::Tensor& x, int root);
  // From one rank to another; sends to one rank arrive in order. send may return before the other has received.
  void send(const at::Tensor& x, int to);
  void receive(const at::Tensor& x, int from);
  // Returns when every rank has called it.
  void wait_for_all();

  // Bytes that this rank has given to collectives so far: x of a sum, a maximum, a send, and of a broadcast on its
  // root; the part of a gather; the whole of a scatter_sum; the rows of an exchange that go to other ranks. Counted
  // when a collective is started.
  std::int64_t bytes() const { return bytes_; }
  // Logs collectives from now on under the axis' name; null: stops logging.
  void record(std::shared_ptr<TrafficLog> log, std::string_view axis) { log_ = std::move(log), axis_ = axis; }
  // Seconds that this rank has spent in `receive`.
  double waited() const { return waited_; }

 protected:
  // The collectives of groups larger than one, on arguments that were checked.
  virtual std::unique_ptr<Pending::Work> do_start_add(const at::Tensor& x) = 0;
  virtual std::unique_ptr<Pending::Work> do_start_gather(const at::Tensor& part, const at::Tensor& whole) = 0;
  virtual std::unique_ptr<Pending::Work> do_start_scatter_sum(const at::Tensor& whole, const at::Tensor& part) = 0;
  virtual void do_max(const at::Tensor& x) = 0;
  virtual void do_exchange(const at::Tensor& send, std::span<const std::int64_t> send_rows, const at::Tensor& receive,
                           std::span<const std::int64_t> receive_rows) = 0;
  virtual void do_broadcast(const at::Tensor& x, int root) = 0;
  virtual void do_send(const at::Tensor& x, int to) = 0;
  virtual void do_receive(const at::Tensor& x, int from) = 0;

 private:
  bool alone() const { return size_ == 1; }
  // Counts and logs a starting collective; null: there is no log.
  std::shared_ptr<CollectiveEvent> begin(std::string_view call, std::int64_t bytes, std::string of = {});
  // Counts and logs a blocking collective.
  template <class Call>
  void run(std::string_view name, std::int64_t bytes, Call&& call);

  int rank_, size_;
  std::int64_t bytes_ = 0;
  double waited_ = 0;
  std::shared_ptr<TrafficLog> log_;
  std::string_view axis_;
};

// Collectives of numbers in host memory. Every rank gets the result.
std::vector<double> sums_over_ranks(Group& group, std::vector<double> values);
void add_over_ranks(Group& group, std::span<std::int64_t> counts);  // in place
std::vector<double> maxima_over_ranks(Group& group, std::vector<double> values);
// Each value from any rank that has it; ranks without it pass NaN. NaN if no rank has it. Ranks that have a value must
// agree.
std::vector<double> values_of_any(Group& group, std::vector<double> values);
// The text of rank `root`.
std::string text_of_rank(Group& group, const std::string& text, int root = 0);
// Every rank's number, in rank order.
std::vector<std::uint64_t> numbers_of_ranks(Group& group, std::uint64_t number);

}  // namespace espalier
