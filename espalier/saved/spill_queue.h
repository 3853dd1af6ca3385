// Moves chunks to a store and back on one thread while others compute.
//
// A bounded number of chunks is in flight. Writes go first; otherwise jobs run in the order of the calls. After an
// error the thread runs no more jobs, and reserve, room and take throw the error on the caller's thread.
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
  // ahead leaves `for_writing` of them free.
  SpillQueue(std::unique_ptr<Store> store, int chunks, int for_writing = 0, Device& device = bound_device());
  ~SpillQueue();  // drops jobs that have not begun
  SpillQueue(const SpillQueue&) = delete;
  SpillQueue& operator=(const SpillQueue&) = delete;

  // Reserves this many bytes in the store before anything is written. Throws the errors of Store::reserve.
  void reserve(std::int64_t bytes);

  // Waits for a free buffer. write or give_back returns it.
  std::byte* room();
  // Writes the buffer's bytes to the chunk as it is now. The chunk must not move until its bytes are read or the queue
  // is gone, and may be written again.
  void write(StoredChunk& chunk, std::byte* room);
  // Requests a written chunk, which must not move until it is taken. Chunks arrive in the order of the calls, read
  // ahead as far as buffers allow.
  void ask(const StoredChunk& chunk);
  // Waits for the oldest chunk that was requested and not yet taken; returns its buffer.
  std::byte* take();
  std::int64_t asked() const { return asked_; }  // chunks requested and not taken
  void give_back(std::byte* room);
  // Waits for writes. Drops chunks that were requested and not taken. Throws nothing.
  void forget();

  // The store is a stack; this is its top.
  std::int64_t store_top() const { return store_top_; }
  void set_store_top(std::int64_t top) { store_top_ = top; }

 private:
  struct Job {
    StoredChunk* chunk;  // null: the job reserves space
    StoredChunk now;     // its state when the job was made
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
  std::deque<const StoredChunk*> reads_;  // in the order of the requests
  std::vector<std::byte*> free_;          // the one used last at the end
  std::size_t for_writing_;
  std::deque<std::byte*> read_;  // oldest first
  std::int64_t asked_ = 0;       // chunks requested and not taken
  std::exception_ptr error_;
  bool stops_ = false, works_ = false;
  std::thread thread_;
};

}  // namespace espalier
