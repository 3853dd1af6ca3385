// The CUDA functions that the device and its operations use: streams, events, memory. runtime.cpp: the CUDA runtime
// and driver; tests/cuda/emulated_runtime.cpp for processors, where streams run late and out of step. All host logic
// stands above, in device.cpp.
#pragma once

#include <cstddef>
#include <cstdint>

namespace espalier::cuda {

// Streams. Work of one runs in the order in which it was given; that of two in no order but the events'. Besides these
// two, those that make_queue() has made.
enum class Queue : int { compute, copy };
Queue make_queue();

// A place in a queue: it has happened when everything given to the queue before it has run.
using Event = std::int64_t;
inline constexpr Event kNoEvent = -1;

Event record(Queue queue);
void wait(Queue queue, Event event);             // work given to the queue from now on runs after it
void synchronize(Event event);                   // returns when it has happened
bool happened(Event event);                      // whether it has
void forget(Event event);                        // its place may serve another
double seconds_between(Event begin, Event end);  // both have happened

// Copies between a device's memory and the host's, which stays as it is until the copy has run.
void copy(Queue queue, void* to, const void* from, std::size_t bytes);
// Rows of `width` bytes.
struct CopiedRows {
  void* to;
  std::size_t to_stride;
  const void* from;
  std::size_t from_stride, width, rows;
};
void copy_rows(Queue queue, const CopiedRows& rows);

// Host memory that copies read and write directly. Errors: MemoryBudgetError.
void* take_pinned(std::size_t bytes);
void give_back_pinned(void* memory);

// Addresses without memory, and pages of memory behind them; all in multiples of page_bytes(). Nothing that runs may
// touch a page that comes or goes. Errors: MemoryBudgetError.
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
// Whether memory of the device is at this address.
bool on_device(const void* address);

}  // namespace espalier::cuda
