// The CUDA functions used by the device and its operations: streams, events, memory. runtime.cpp uses the CUDA runtime
// and driver; tests/cuda/emulated_runtime.cpp emulates them on a CPU, with streams that run late and out of step. All
// host logic is above, in device.cpp.
#pragma once

#include <cstddef>
#include <cstdint>

namespace espalier::cuda {

// Streams. Work of one stream runs in order; work of different streams is ordered by events only. make_queue() creates
// further ones.
enum class Queue : int { compute, copy };
Queue make_queue();
// The GPU's own queues, to which streams are dealt in turn. Work of streams that share one starts in the order in which
// it was given: a collective that waits for another rank then holds up what that rank waits for.
int connections();
inline constexpr int kMostConnections = 32;

// A place in a queue: it has happened when all earlier work of the queue has run.
using Event = std::int64_t;
inline constexpr Event kNoEvent = -1;

Event record(Queue queue);
void wait(Queue queue, Event event);             // later work of the queue runs after the event
void synchronize(Event event);                   // returns when the event has happened
bool happened(Event event);                      // whether the event has happened
void forget(Event event);                        // the event may be reused
double seconds_between(Event begin, Event end);  // both events have happened

// Copies between device and host memory. Host memory must not change until the copy has run.
void copy(Queue queue, void* to, const void* from, std::size_t bytes);
// Rows of `width` bytes.
struct CopiedRows {
  void* to;
  std::size_t to_stride;
  const void* from;
  std::size_t from_stride, width, rows;
};
void copy_rows(Queue queue, const CopiedRows& rows);

// Pinned host memory, which copies access directly. Errors: MemoryBudgetError.
void* take_pinned(std::size_t bytes);
void give_back_pinned(void* memory);

// Address ranges, and pages of memory mapped into them, in multiples of page_bytes(). Running work must not touch a
// page that is being mapped or unmapped. Errors: MemoryBudgetError.
std::int64_t page_bytes();
using Page = std::uint64_t;
inline constexpr Page kNoPage = 0;
std::byte* reserve_addresses(std::int64_t bytes);
void give_back_addresses(std::byte* memory, std::int64_t bytes);
Page take_page();
void give_back_page(Page page);
void map_page(Page page, std::byte* at);
void unmap_page(Page page, std::byte* at);
std::int64_t free_memory();
std::int64_t held_memory();  // taken since start, by other programs too
// True if the address is in device memory.
bool on_device(const void* address);

}  // namespace espalier::cuda
