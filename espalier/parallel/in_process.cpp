#include "espalier/parallel/in_process.h"

#include <ATen/ATen.h>
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <numeric>
#include <thread>

#include "espalier/base/error.h"

namespace espalier {
namespace {

using Clock = std::chrono::steady_clock;

// What a rank brings to a collective.
struct Offer {
  const char* call = "";
  std::int64_t argument = 0;  // root or the like: must be the same on all ranks
  at::Tensor tensor;
  std::vector<std::int64_t> rows;
};

// What the threads of one group share. One lock for the whole world: tests have few ranks, and small tensors.
struct Meeting {
  explicit Meeting(std::size_t size) : offers(size), given(size) {}

  std::vector<Offer> offers;
  // What the last one to come makes of them. It stays until all have come again, which they do after reading it.
  at::Tensor result;
  std::vector<Offer> given;
  std::size_t arrived = 0;
  std::uint64_t round = 0;
  std::map<std::pair<int, int>, std::deque<at::Tensor>> mail;  // from, to
  std::condition_variable changed;
};

class World {
 public:
  explicit World(double timeout) : timeout_(timeout) {}

  Meeting& meeting_of(const std::vector<int>& ranks) {
    const std::lock_guard lock(mutex_);
    return meetings_.try_emplace(ranks, ranks.size()).first->second;
  }

  // Returns when all ranks of the group have come and the last one has called combine().
  template <class Combine>
  void meet(Meeting& meeting, const char* call, Combine&& combine) {
    std::unique_lock lock(mutex_);
    check_alive(call);
    if (++meeting.arrived == meeting.offers.size()) {
      combine();
      meeting.arrived = 0;
      ++meeting.round;
      meeting.changed.notify_all();
      return;
    }
    wait(lock, meeting, call, [&, round = meeting.round] { return meeting.round != round; });
  }

  void post(Meeting& meeting, int from, int to, const at::Tensor& x) {
    const std::lock_guard lock(mutex_);
    check_alive("send");
    meeting.mail[{from, to}].push_back(x.clone());
    meeting.changed.notify_all();
  }
  at::Tensor take(Meeting& meeting, int from, int to) {
    std::unique_lock lock(mutex_);
    std::deque<at::Tensor>& mail = meeting.mail[{from, to}];
    wait(lock, meeting, "receive", [&] { return !mail.empty(); });
    at::Tensor x = mail.front();
    mail.pop_front();
    return x;
  }

  // Keeps the first exception of any rank, which ends all of them.
  void fail(std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = error;
    for (auto& [ranks, meeting] : meetings_) meeting.changed.notify_all();
  }
  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  void check_alive(const char* call) const {
    if (error_) throw CommunicationError({call, "an answer of every rank", "the end of one of them", ""});
  }
  template <class Ready>
  void wait(std::unique_lock<std::mutex>& lock, Meeting& meeting, const char* call, Ready ready) {
    const auto end =
        Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_));
    const bool in_time = meeting.changed.wait_until(lock, end, [&] { return ready() || error_; });
    if (in_time && ready()) return;
    check_alive(call);
    throw CommunicationError(
        {call, text_of("an answer of every rank within ", timeout_, " seconds"), "silence of one of them", ""});
  }

  double timeout_;
  std::mutex mutex_;
  std::exception_ptr error_;
  std::map<std::vector<int>, Meeting> meetings_;
};

class ThreadGroup : public Group {
 public:
  ThreadGroup(World& world, const std::vector<int>& ranks, int rank)
      : Group(rank, static_cast<int>(ranks.size())), world_(world), meeting_(world.meeting_of(ranks)) {}

 private:
  // Every rank offers; the last one to come combines what all have offered.
  template <class Combine>
  void together(Offer offer, Combine&& combine) {
    const char* call = offer.call;
    meeting_.offers[static_cast<std::size_t>(rank())] = std::move(offer);
    world_.meet(meeting_, call, [&] {
      check_agreement();
      combine();
    });
  }

  void check_agreement() const {
    const Offer& own = meeting_.offers[static_cast<std::size_t>(rank())];
    for (const Offer& other : meeting_.offers) {
      const bool same = std::string_view(other.call) == own.call && other.argument == own.argument &&
                        other.tensor.scalar_type() == own.tensor.scalar_type() &&
                        (!own.rows.empty() || other.tensor.numel() == own.tensor.numel());
      if (!same)
        throw CommunicationError({own.call, text_of("the same call on every rank, here of ", own.tensor.sizes()),
                                  text_of(other.call, " of ", other.tensor.sizes()), ""});
    }
  }

  at::Tensor offered(int rank) const { return meeting_.offers[static_cast<std::size_t>(rank)].tensor; }

  at::Tensor sum() const {
    at::Tensor sum = offered(0).clone();
    for (int r = 1; r < size(); ++r) sum.add_(offered(r));
    return sum;
  }

  void do_add(const at::Tensor& x) override {
    together({"add_over_ranks", 0, x, {}}, [&] { meeting_.result = sum(); });
    x.copy_(meeting_.result.view(x.sizes()));
  }

  void do_max(const at::Tensor& x) override {
    together({"max_over_ranks", 0, x, {}}, [&] {
      meeting_.result = offered(0).clone();
      for (int r = 1; r < size(); ++r) at::maximum_out(meeting_.result, meeting_.result, offered(r));
    });
    x.copy_(meeting_.result.view(x.sizes()));
  }

  void do_gather(const at::Tensor& part, const at::Tensor& whole) override {
    together({"gather", 0, part, {}}, [&] {
      std::vector<at::Tensor> parts;
      for (int r = 0; r < size(); ++r) parts.push_back(offered(r).view(-1));
      meeting_.result = at::cat(parts);
    });
    whole.view(-1).copy_(meeting_.result);
  }

  void do_scatter_sum(const at::Tensor& whole, const at::Tensor& part) override {
    together({"scatter_sum", 0, whole, {}}, [&] { meeting_.result = sum(); });
    part.view(-1).copy_(meeting_.result.view(-1).narrow(0, rank() * part.numel(), part.numel()));
  }

  void do_exchange(const at::Tensor& send, std::span<const std::int64_t> send_rows, const at::Tensor& receive,
                   std::span<const std::int64_t> receive_rows) override {
    together({"exchange", 0, send, {send_rows.begin(), send_rows.end()}}, [&] {
      meeting_.given = meeting_.offers;
      for (Offer& offer : meeting_.given) offer.tensor = offer.tensor.clone();
    });
    std::int64_t to = 0;
    for (int r = 0; r < size(); ++r) {
      const Offer& given = meeting_.given[static_cast<std::size_t>(r)];
      const std::int64_t count = given.rows[static_cast<std::size_t>(rank())];
      const std::int64_t from = std::accumulate(given.rows.begin(), given.rows.begin() + rank(), std::int64_t{0});
      if (count != receive_rows[static_cast<std::size_t>(r)])
        throw CommunicationError(
            {"exchange", text_of(receive_rows[static_cast<std::size_t>(r)], " rows of rank ", r), text_of(count), ""});
      receive.narrow(0, to, count).copy_(given.tensor.narrow(0, from, count));
      to += count;
    }
  }

  void do_broadcast(const at::Tensor& x, int root) override {
    together({"broadcast", root, x, {}}, [&] { meeting_.result = offered(root).clone(); });
    x.copy_(meeting_.result.view(x.sizes()));
  }

  void do_send(const at::Tensor& x, int to) override { world_.post(meeting_, rank(), to, x); }

  void do_receive(const at::Tensor& x, int from) override {
    const at::Tensor mail = world_.take(meeting_, from, rank());
    if (mail.numel() != x.numel() || mail.scalar_type() != x.scalar_type())
      throw CommunicationError({"receive", text_of(x.sizes()), text_of(mail.sizes()), ""});
    x.view(-1).copy_(mail.view(-1));
  }

  World& world_;
  Meeting& meeting_;
};

}  // namespace

void run_ranks(const Degrees& degrees, const std::function<void(const Mesh& mesh)>& body,
               const InProcessOptions& options) {
  World world(options.timeout);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < degrees.ranks(); ++rank)
    threads.emplace_back([&, rank] {
      omp_set_num_threads(options.threads);
      try {
        const OwnedMesh own(rank, degrees, [&](const std::vector<int>& ranks) -> std::unique_ptr<Group> {
          const auto place = std::find(ranks.begin(), ranks.end(), rank) - ranks.begin();
          return std::make_unique<ThreadGroup>(world, ranks, static_cast<int>(place));
        });
        body(own.mesh());
      } catch (...) {
        world.fail(std::current_exception());
      }
    });
  for (std::thread& thread : threads) thread.join();
  world.rethrow();
}

}  // namespace espalier
