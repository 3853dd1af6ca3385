// Chunks on their way to a store and back, written and read by one thread while others compute.
//
// A bounded number of chunks is in flight. Writes go first, otherwise jobs run in the order in which
// they were asked for. An error of the thread is thrown by the next call that waits, on the caller's thread.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "espalier/saved/store.h"

namespace espalier {

class SpillQueue {
 public:
  // `chunks` buffers of kSpillChunkBytes (forecast/memory_model.h) each, in memory that the device copies fast. Reading
  // ahead leaves `for_writing` of them.
  SpillQueue(std::unique_ptr<Store> store, int chunks, int for_writing = 0, Device& device = bound_device());
  ~SpillQueue();  // drops what has not begun
  SpillQueue(const SpillQueue&) = delete;
  SpillQueue& operator=(const SpillQueue&) = delete;

  // Space in the store for so many bytes, before anything is written. Errors: those of Store::reserve.
  void reserve(std::int64_t bytes);

  // A free buffer, as soon as there is one; it goes back by write or give_back.
  std::byte* room();
  // Writes the buffer's bytes, the chunk's as they are now. The chunk must stay in its place until they are read or the
  // queue is gone, and may be written again.
  void write(StoredChunk& chunk, std::byte* room);
  // Asks for a written chunk. Chunks arrive in the order of the calls, read ahead as far as there are buffers.
  void ask(const StoredChunk& chunk);
  // The buffer with the oldest chunk that was asked for and not yet taken.
  std::byte* take();
  std::int64_t asked() const { return asked_; }  // for and not taken
  void give_back(std::byte* room);
  // Waits for what is written. Chunks that were asked for and not taken are not wanted any more. Throws nothing.
  void forget();

  // The store is filled as a stack.
  std::int64_t store_top() const { return store_top_; }
  void set_store_top(std::int64_t top) { store_top_ = top; }

 private:
  struct Job {
    StoredChunk* chunk;  // null: space is reserved
    StoredChunk now;     // as it is when the job is made
    std::byte* room = nullptr;
  };

  void run();
  bool can_read() const { return !reads_.empty() && free_.size() > for_writing_; }
  void wait_for(std::unique_lock<std::mutex>& lock, auto&& condition);

  std::unique_ptr<Store> store_;
  Device& device_;
  std::byte* memory_ = nullptr;
  std::int64_t memory_bytes_ = 0, store_top_ = 0;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> writes_;                // and reservations
  std::deque<const StoredChunk*> reads_;  // in the order asked for
  std::vector<std::byte*> free_;          // the one used last at the end
  std::size_t for_writing_;
  std::deque<std::byte*> read_;  // oldest first
  std::int64_t asked_ = 0;       // chunks asked for and not taken
  std::exception_ptr error_;
  bool stops_ = false, works_ = false;
  std::thread thread_;
};

}  // namespace espalier
