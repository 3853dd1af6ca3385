#include "tests/support/in_process.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/concat.h>
#include <ATen/ops/maximum.h>
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>

#include "espalier/base/error.h"
#include "espalier/device/device.h"
#include "espalier/metrics/timer.h"

namespace espalier {
namespace {

using Clock = std::chrono::steady_clock;

// A rank's part in a collective.
struct Offer {
  const char* call = "";
  std::int64_t argument = 0;  // root or the like: must be the same on all ranks
  at::Tensor tensor;
  std::vector<std::int64_t> rows;
};

// One of a group: it is over when all ranks have offered, the last one of whom combines what they gave.
struct Collective {
  explicit Collective(std::size_t size) : offers(size) {}

  std::vector<Offer> offers;  // by rank
  at::Tensor result;          // of all of them together
  std::vector<Offer> given;   // copies, where each takes something else
  std::size_t arrived = 0;
  bool over = false;
  double ended = 0;
};

// State that the threads of one group share. One lock for the whole world: tests have few ranks, and small tensors.
struct Meeting {
  explicit Meeting(std::size_t ranks) : size(ranks) {}

  std::size_t size;
  std::map<std::uint64_t, std::shared_ptr<Collective>> open;   // that some rank has not come to yet, by number
  std::map<std::pair<int, int>, std::deque<at::Tensor>> mail;  // from, to
  std::condition_variable changed;
};

class World {
 public:
  explicit World(double timeout) : timeout_(timeout) {}

  Meeting& meeting_of(const GroupKey& key) {
    const std::lock_guard lock(mutex_);
    return meetings_.try_emplace(key, key.ranks.size()).first->second;
  }

  // Offers to the collective of this number; the last one to do so calls combine(collective).
  template <class Combine>
  std::shared_ptr<Collective> join(Meeting& meeting, std::uint64_t number, std::size_t rank, Offer offer,
                                   Combine&& combine) {
    const std::lock_guard lock(mutex_);
    check_alive(offer.call);
    std::shared_ptr<Collective>& here = meeting.open[number];
    if (!here) here = std::make_shared<Collective>(meeting.size);
    const std::shared_ptr<Collective> joined = here;
    joined->offers[rank] = std::move(offer);
    if (++joined->arrived < meeting.size) return joined;
    meeting.open.erase(number);
    combine(*joined);
    joined->over = true, joined->ended = Timer::steady_seconds();
    meeting.changed.notify_all();
    return joined;
  }
  void wait_for(Meeting& meeting, const char* call, const Collective& collective) {
    std::unique_lock lock(mutex_);
    wait(lock, meeting, call, [&] { return collective.over; });
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
  void fail(const std::exception_ptr& error) {
    const std::lock_guard lock(mutex_);
    end_all(error);
  }
  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  void end_all(const std::exception_ptr& error) {
    if (!error_) error_ = error;
    for (auto& [key, meeting] : meetings_) meeting.changed.notify_all();
  }
  void check_alive(const char* call) const {
    if (error_) throw CommunicationError({call, "an answer of every rank", "one of them ended", ""});
  }
  template <class Ready>
  void wait(std::unique_lock<std::mutex>& lock, Meeting& meeting, const char* call, Ready ready) {
    const auto end =
        Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_));
    const bool in_time = meeting.changed.wait_until(lock, end, [&] { return ready() || error_; });
    if (in_time && ready()) return;
    check_alive(call);
    const CommunicationError silence(
        {call, text_of("an answer of every rank within ", timeout_, " seconds"), "no answer from one of them", ""});
    end_all(std::make_exception_ptr(silence));  // nobody waits for its other collectives
    throw silence;
  }

  double timeout_;
  std::mutex mutex_;
  std::exception_ptr error_;
  std::map<GroupKey, Meeting> meetings_;
};

void check_agreement(const Collective& collective) {
  const Offer& own = collective.offers.front();
  for (const Offer& other : collective.offers) {
    const bool same = std::string_view(other.call) == own.call && other.argument == own.argument &&
                      other.tensor.scalar_type() == own.tensor.scalar_type() &&
                      (!own.rows.empty() || other.tensor.numel() == own.tensor.numel());
    if (!same)
      throw CommunicationError({own.call, text_of("the same call on every rank, on this one of ", own.tensor.sizes()),
                                text_of(other.call, " of ", other.tensor.sizes()), ""});
  }
}

void add_all(Collective& collective) {
  collective.result = collective.offers.front().tensor.clone();
  for (std::size_t r = 1; r < collective.offers.size(); ++r) collective.result.add_(collective.offers[r].tensor);
}

class ThreadGroup : public Group {
 public:
  ThreadGroup(World& world, const GroupKey& key, int rank)
      : Group(rank, static_cast<int>(key.ranks.size())), world_(world), meeting_(world.meeting_of(key)) {}

 private:
  // A collective that this rank has offered to; `take` gets what it is to have.
  class Offered final : public Pending::Work {
   public:
    using Take = std::function<void(const Collective&)>;
    Offered(ThreadGroup& group, const char* call, std::shared_ptr<Collective> collective, Take take)
        : group_(group), call_(call), collective_(std::move(collective)), take_(std::move(take)) {}
    void wait() override {
      group_.world_.wait_for(group_.meeting_, call_, *collective_);
      take_(*collective_);
    }
    double ended() const override { return collective_->ended; }

   private:
    ThreadGroup& group_;
    const char* call_;
    std::shared_ptr<Collective> collective_;
    Take take_;
  };

  template <class Combine>
  std::unique_ptr<Pending::Work> offer(Offer offer, Combine&& combine, Offered::Take take) {
    const char* call = offer.call;
    auto joined =
        world_.join(meeting_, next_++, static_cast<std::size_t>(rank()), std::move(offer), [&](Collective& collective) {
          check_agreement(collective);
          combine(collective);
        });
    return std::make_unique<Offered>(*this, call, std::move(joined), std::move(take));
  }

  std::unique_ptr<Pending::Work> do_start_add(const at::Tensor& x) override {
    return offer({"add_over_ranks", 0, x, {}}, add_all,
                 [x](const Collective& c) { x.copy_(c.result.view(x.sizes())); });
  }

  std::unique_ptr<Pending::Work> do_start_gather(const at::Tensor& part, const at::Tensor& whole) override {
    const auto combine = [](Collective& c) {
      std::vector<at::Tensor> parts;
      for (const Offer& offer : c.offers) parts.push_back(offer.tensor.view(-1));
      c.result = at::concat(parts);
    };
    return offer({"gather", 0, part, {}}, combine, [whole](const Collective& c) { whole.view(-1).copy_(c.result); });
  }

  std::unique_ptr<Pending::Work> do_start_scatter_sum(const at::Tensor& whole, const at::Tensor& part) override {
    return offer({"scatter_sum", 0, whole, {}}, add_all, [part, place = rank() * part.numel()](const Collective& c) {
      part.view(-1).copy_(c.result.view(-1).narrow(0, place, part.numel()));
    });
  }

  void do_max(const at::Tensor& x) override {
    const auto combine = [](Collective& c) {
      c.result = c.offers.front().tensor.clone();
      for (const Offer& offer : c.offers) at::maximum_out(c.result, c.result, offer.tensor);
    };
    offer({"max_over_ranks", 0, x, {}}, combine, [x](const Collective& c) {
      x.copy_(c.result.view(x.sizes()));
    })->wait();
  }

  void do_exchange(const at::Tensor& send, std::span<const std::int64_t> send_rows, const at::Tensor& receive,
                   std::span<const std::int64_t> receive_rows) override {
    const auto combine = [](Collective& c) {
      c.given = c.offers;
      for (Offer& offer : c.given) offer.tensor = offer.tensor.clone();
    };
    offer({"exchange", 0, send, {send_rows.begin(), send_rows.end()}}, combine, [&](const Collective& c) {
      take_rows(c, receive, receive_rows);
    })->wait();
  }

  void take_rows(const Collective& c, const at::Tensor& receive, std::span<const std::int64_t> receive_rows) const {
    std::int64_t to = 0;
    for (int r = 0; r < size(); ++r) {
      const Offer& given = c.given[static_cast<std::size_t>(r)];
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
    const auto combine = [root](Collective& c) { c.result = c.offers[static_cast<std::size_t>(root)].tensor.clone(); };
    offer({"broadcast", root, x, {}}, combine, [x](const Collective& c) { x.copy_(c.result.view(x.sizes())); })->wait();
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
  std::uint64_t next_ = 0;  // number of the next collective, the same on every rank
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
        bind_device_of_thread(bound_device().of_thread());
        const OwnedMesh own(rank, degrees, [&](const GroupKey& key) {
          const auto place = std::ranges::find(key.ranks, rank) - key.ranks.begin();
          return bound_device().connect(std::make_shared<ThreadGroup>(world, key, static_cast<int>(place)),
                                        options.timeout);
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
