#include "espalier/saved/spill_queue.h"

#include <signal.h>

#include <utility>

#include "espalier/base/error.h"
#include "espalier/saved/spill_buffers.h"

namespace espalier {

SpillQueue::SpillQueue(std::unique_ptr<Store> store, int chunks, int for_writing, Device& device)
    : store_(std::move(store)),
      device_(device),
      memory_bytes_(chunks * kSpillChunkBytes),
      for_writing_(static_cast<std::size_t>(for_writing)) {
  ESPALIER_INTERNAL(chunks > for_writing && kSpillChunkBytes % Store::kAlignment == 0, chunks, " chunks");
  memory_ = device_.take_host_memory(memory_bytes_);
  for (int chunk = chunks; chunk > 0; --chunk) free_.push_back(memory_ + (chunk - 1) * kSpillChunkBytes);
  thread_ = std::thread([this] { run(); });
}

SpillQueue::~SpillQueue() {
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
  }
  changed_.notify_all();
  thread_.join();
  device_.give_back_host_memory(memory_, memory_bytes_);
}

void SpillQueue::wait_for(std::unique_lock<std::mutex>& lock, auto&& condition) {
  changed_.wait(lock, [&] { return error_ || condition(); });
  if (error_) std::rethrow_exception(error_);
}

void SpillQueue::reserve(std::int64_t bytes) {
  std::unique_lock lock(mutex_);
  writes_.push_back({nullptr, {0, bytes, 0}});
  changed_.notify_all();
  wait_for(lock, [&] { return writes_.empty() && !works_; });
}

std::byte* SpillQueue::room() {
  std::unique_lock lock(mutex_);
  wait_for(lock, [&] { return !free_.empty(); });
  std::byte* const room = free_.back();
  free_.pop_back();
  return room;
}

void SpillQueue::write(StoredChunk& chunk, std::byte* room) {
  const std::lock_guard lock(mutex_);
  writes_.push_back({&chunk, chunk, room});
  changed_.notify_all();
}

void SpillQueue::ask(const StoredChunk& chunk) {
  const std::lock_guard lock(mutex_);
  reads_.push_back(&chunk);
  ++asked_;
  changed_.notify_all();
}

std::byte* SpillQueue::take() {
  std::unique_lock lock(mutex_);
  ESPALIER_INTERNAL(asked_ > 0, "no chunk was asked for");
  wait_for(lock, [&] { return !read_.empty(); });
  std::byte* const room = read_.front();
  read_.pop_front();
  --asked_;
  return room;
}

void SpillQueue::give_back(std::byte* room) {
  const std::lock_guard lock(mutex_);
  free_.push_back(room);
  changed_.notify_all();
}

void SpillQueue::forget() {
  std::unique_lock lock(mutex_);
  reads_.clear();
  changed_.wait(lock, [&] { return !works_ && (writes_.empty() || error_); });
  free_.insert(free_.end(), read_.begin(), read_.end());
  read_.clear();
  asked_ = 0;
  changed_.notify_all();
}

void SpillQueue::run() {
  sigset_t limits;  // a limit on the size of files is an error of the write, not the end of the process
  sigfillset(&limits);
  pthread_sigmask(SIG_BLOCK, &limits, nullptr);
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stops_ || (!error_ && (!writes_.empty() || can_read())); });
    if (stops_) return;
    Job job{};
    const StoredChunk* asked = nullptr;
    if (!writes_.empty()) {
      job = writes_.front();
      writes_.pop_front();
    } else {
      asked = reads_.front();
      reads_.pop_front();
      job.room = free_.back();
      free_.pop_back();
    }
    works_ = true;
    lock.unlock();
    std::exception_ptr error;
    try {
      if (asked != nullptr)
        store_->read(*asked, job.room);
      else if (job.chunk != nullptr)
        store_->write(job.now, job.room);
      else
        store_->reserve(job.now.bytes);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    works_ = false;
    if (error) error_ = error;
    if (asked != nullptr)
      read_.push_back(job.room);
    else if (job.chunk != nullptr)
      job.chunk->checksum = job.now.checksum, free_.push_back(job.room);
    changed_.notify_all();
  }
}

}  // namespace espalier
