// Calls to CUDA and NCCL by the CUDA library's host code, and the rules that they keep. Calls are recorded; work of
// a stream runs when it is given, which is one order that CUDA allows, and clocks tell which others it allows: what two
// streams, or a stream and the host, touch without an event between is reported whatever the order was.
//
// Rules, from the CUDA Runtime and Driver API references and the NCCL documentation:
//   events     recorded before a stream or the host waits for them; known to have happened before their time is asked
//   for memory     two accesses of which one writes are ordered by a stream, an event or the host; a copy lies in
//   device
//              memory that is there; the host's side of a copy stays as it is until the copy is known to have run
//   pages      mapped at one place, readable before they are used, unmapped when no work uses them, released once and
//              when they are mapped nowhere; reserved addresses are freed without pages
//   pinned     neither taken nor freed while a collective may run: both may wait for the device
//   NCCL       a communicator works between its start and its end, inside of a group, and only when its last call,
//   which
//              does not block, is known to be done
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace espalier::testing {

class Recorder {
 public:
  static Recorder& one();

  // Violations so far.
  const std::vector<std::string>& violations() const { return violations_; }
  std::int64_t calls(const std::string& name) const;  // how often it was called
  void called(const std::string& name) { ++calls_[name]; }
  void expect(bool holds, const std::string& rule) {
    if (!holds) violations_.push_back(rule);
  }

  // ---- streams and events ----
  void* make_stream();
  void* make_event();
  void record(void* event, void* stream);
  void wait(void* stream, void* event);
  void synchronize(void* event);
  bool happened(void* event);
  void time_between(void* begin, void* end);

  // ---- memory ----
  enum class Place { scratch, page, pinned };
  void* take(Place place, std::size_t bytes);
  void give_back(Place place, void* memory);
  void give_back_in(void* stream, void* memory);  // scratch, in the order of a stream
  void* reserve(std::size_t bytes);
  void free_addresses(void* at, std::size_t bytes);
  std::uint64_t make_page();
  void release(std::uint64_t page);
  void map(void* at, std::size_t bytes, std::uint64_t page);
  void allow(void* at, std::size_t bytes);
  void unmap(void* at, std::size_t bytes);
  bool on_device(const void* at) const;

  // A copy of rows, and zeros.
  void copy(void* stream, void* to, std::size_t to_stride, const void* from, std::size_t from_stride, std::size_t width,
            std::size_t rows);
  void zero(void* stream, void* to, std::size_t bytes);

  // ---- NCCL ----
  void* make_communicator();
  void group(int change);  // begins or ends a group
  void call_done();        // of every communicator: its state was asked for
  void end_communicator(void* communicator, bool finalizes);
  void collective(void* communicator, void* stream, const void* from, std::size_t from_bytes, void* to,
                  std::size_t to_bytes);
  bool is_in_group() const { return groups_ > 0; }
  bool refuses = false;  // NCCL refuses collectives

 private:
  using Clock = std::map<const void*, std::int64_t>;  // of streams; the host's own steps are at null
  struct Event {
    bool recorded = false;
    Clock clock;
  };
  struct Access {
    std::uintptr_t begin, end;
    const void* actor;  // a stream, or null: the host
    std::int64_t time;
    bool writes, of_collective;
  };
  struct Block {
    std::size_t bytes;
    bool readable;
    std::uint64_t page;  // 0: not mapped
  };
  struct Delivery {
    const void* stream;
    std::int64_t time;
    std::byte* to;
    std::vector<std::byte> bytes;
  };
  struct Communicator {
    bool live = true, busy = true, finalized = false, used = false;  // used: in the group that is open
  };

  static void join(Clock& clock, const Clock& other);
  static bool knows(const Clock& clock, const Access& access);
  Event& known(void* event, const std::string& what);
  void learn(const Clock& clock);  // the host
  // A step of a stream that the host gives now; returns its time.
  std::int64_t step(void* stream);
  void access(const void* actor, std::int64_t time, const void* at, std::size_t bytes, bool writes,
              bool of_collective = false);
  void expect_there(const void* at, std::size_t bytes, const std::string& what);
  void expect_unused(const Clock& clock, const void* at, std::size_t bytes, const std::string& what);
  void expect_no_collective(const std::string& what);
  const Block* block_of(const void* at) const;

  std::vector<std::string> violations_;
  std::map<std::string, std::int64_t> calls_;
  std::map<const void*, Clock> clocks_;  // of streams
  Clock host_;
  std::map<void*, Event> events_;
  std::vector<Access> accesses_;
  std::vector<Delivery> deliveries_;
  std::map<std::uintptr_t, Block> device_;  // scratch and pages
  std::map<std::uintptr_t, std::size_t> pinned_, addresses_;
  std::map<std::uint64_t, std::uintptr_t> pages_;  // 0: mapped nowhere
  std::map<void*, Communicator> communicators_;
  std::set<std::uint64_t> released_;
  int groups_ = 0;
};

}  // namespace espalier::testing
