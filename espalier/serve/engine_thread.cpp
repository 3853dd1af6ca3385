#include "espalier/serve/engine_thread.h"

#include <utility>

namespace espalier::serve {

EngineThread::EngineThread(Unit begin)
    : thread_([this, begin = std::move(begin)] {
        begin();
        run();
      }) {}

EngineThread::~EngineThread() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void EngineThread::add(const std::string& line, Unit unit) {
  {
    const std::lock_guard lock(mutex_);
    lines_[line].push_back(std::move(unit));
    ++waiting_;
  }
  changed_.notify_one();
}

std::int64_t EngineThread::waiting() const {
  const std::lock_guard lock(mutex_);
  return waiting_;
}

void EngineThread::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return ends_ || !lines_.empty(); });
    if (ends_) return;
    auto line = lines_.upper_bound(last_);
    if (line == lines_.end()) line = lines_.begin();
    last_ = line->first;
    Unit unit = std::move(line->second.front());
    line->second.pop_front();
    if (line->second.empty()) lines_.erase(line);
    --waiting_;
    lock.unlock();
    unit();
    unit = {};
    lock.lock();
  }
}

}  // namespace espalier::serve
