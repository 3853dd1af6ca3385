// Streams and device memory of one rank on a processor: the mechanism under emulated_runtime.cpp. Each thread has its
// own, so that ranks may be threads.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "espalier/ops/cuda/runtime.h"

namespace espalier::testing {

// The device memory that exists; the host can touch none of it while nothing runs.
class DeviceMemory {
 public:
  void add(std::byte* begin, std::size_t bytes);
  void remove(std::byte* begin);
  bool holds(const void* address) const;
  std::int64_t bytes() const;
  // Blocks behind each other are opened and closed together.
  void open(bool opens);

 private:
  std::map<std::byte*, std::size_t> blocks_;
  bool open_ = false;
};

// The pages of a device and where they are mapped. A call that the driver refuses, or that leaves a page in two places
// or in none, is an InternalError.
class PageTable {
 public:
  void reserve(std::byte* begin, std::int64_t bytes);
  void free(std::byte* begin, std::int64_t bytes);  // no page is left in it
  cuda::Page take();
  void give_back(cuda::Page page);  // it is mapped nowhere
  void map(cuda::Page page, std::byte* at);
  void unmap(cuda::Page page, std::byte* at);

 private:
  std::map<std::byte*, std::int64_t> ranges_;
  std::map<cuda::Page, std::byte*> place_;  // null: nowhere
  std::map<std::byte*, cuda::Page> page_at_;
  cuda::Page last_ = cuda::kNoPage;
};

// Work that waits for other ranks: `begin` and `end` run as the stream does, `call` beside everything else.
struct Remote {
  std::function<void()> begin, call, end;
};

class EmulatedStreams {
 public:
  explicit EmulatedStreams(unsigned seed) : seed_(seed), random_(seed) {}
  DeviceMemory memory;
  PageTable pages;

  void set_seed(unsigned seed);  // once everything given has run
  // Streams dealt to so many queues of the GPU: of those that share one, work starts in the order in which it was
  // given.
  void set_connections(int connections) { connections_ = connections; }
  int connections() const { return connections_; }
  cuda::Queue make_queue();
  void give(cuda::Queue queue, std::function<void()> work);
  void give(cuda::Queue queue, Remote remote);
  // Numbers of events are used again, as on a GPU; one that was forgotten is nobody's until then.
  cuda::Event record(cuda::Queue queue);
  void forget(cuda::Event event);
  void wait(cuda::Queue queue, cuda::Event event);
  double time_of(cuda::Event event) const { return happened_[moment_of(event)]; }  // or -1

  void run_until(cuda::Event event);
  // Runs until it has happened, or until all streams wait for other ranks.
  void run_towards(cuda::Event event);
  // One step of any stream. False: all wait for other ranks.
  bool step();
  bool idle() const;          // nothing was given that has not run
  bool meets_others() const;  // something was given that waits for other ranks and has not run

 private:
  struct Entry {
    std::function<void()> work = {};
    std::size_t moment = 0;  // of the event that happens, or that is waited for
    bool waits = false;
    std::size_t number = 0;  // among all that was given
    std::shared_ptr<Remote> remote = {};
    std::shared_ptr<std::future<void>> under_way = {};  // the remote's call, once it began
  };
  enum class State { empty, blocked, under_way, ready };

  std::deque<Entry>& queue_of(cuda::Queue queue) { return queues_.at(static_cast<std::size_t>(queue)); }
  void add(cuda::Queue queue, Entry entry);
  bool is_first_of_connection(std::size_t queue) const;
  State state_of(std::size_t queue) const;
  // With the device's memory open. An exception drops everything that was given, as if it had run.
  template <class Work>
  void opened(Work&& work);
  void drop_all();
  bool run_one();
  void run_front(std::deque<Entry>& queue);
  void run_remote(std::deque<Entry>& queue);

  // The last recording of an event.
  std::size_t moment_of(cuda::Event event) const;

  std::vector<std::deque<Entry>> queues_{2};
  std::size_t given_ = 0;
  int connections_ = 32;
  std::vector<double> happened_;      // by recording: seconds at which it happened, or -1
  std::vector<std::size_t> moments_;  // by event
  std::vector<bool> forgotten_;       // by event
  std::vector<cuda::Event> free_;
  unsigned seed_;
  std::mt19937 random_;
};

// Returns this thread's own streams if it has any, else the streams of the process, which its threads use in turns.
EmulatedStreams& streams();
// From now on this thread, a rank with a device of its own, has streams of its own.
void make_streams_of_thread();

}  // namespace espalier::testing
