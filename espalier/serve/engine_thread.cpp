#include "espalier/serve/engine_thread.h"

#include <utility>

namespace espalier::serve {

namespace {

class PlainUnit final : public Unit {
 public:
  explicit PlainUnit(EngineThread::Work work) : work_(std::move(work)) {}
  void run() override { work_(); }

 private:
  EngineThread::Work work_;
};

}  // namespace

EngineThread::EngineThread(Work begin, std::function<bool()> between)
    : thread_([this, begin = std::move(begin), between = std::move(between)] {
        begin();
        run(between);
      }) {}

EngineThread::~EngineThread() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void EngineThread::add(const std::string& line, std::vector<std::shared_ptr<Unit>> units) {
  if (units.empty()) return;
  {
    const std::lock_guard lock(mutex_);
    waiting_ += std::ssize(units);
    std::deque<std::shared_ptr<Unit>>& of_line = lines_[line];
    for (std::shared_ptr<Unit>& unit : units) of_line.push_back(std::move(unit));
  }
  changed_.notify_one();
}

std::shared_ptr<Unit> EngineThread::unit(Work work) { return std::make_shared<PlainUnit>(std::move(work)); }

std::int64_t EngineThread::waiting() const {
  const std::lock_guard lock(mutex_);
  return waiting_;
}

std::string EngineThread::running() const {
  const std::lock_guard lock(mutex_);
  return running_;
}

// The lock is held.
std::shared_ptr<Unit> EngineThread::take_next() {
  auto line = lines_.upper_bound(last_);
  if (line == lines_.end()) line = lines_.begin();
  last_ = line->first;
  std::deque<std::shared_ptr<Unit>>& units = line->second;
  const auto pop = [&] {
    std::shared_ptr<Unit> unit = std::move(units.front());
    units.pop_front();
    --waiting_;
    return unit;
  };
  std::shared_ptr<Unit> unit = pop();
  while (!units.empty() && unit->joins(*units.front())) unit->take(pop());
  if (units.empty()) lines_.erase(line);
  return unit;
}

void EngineThread::run(const std::function<bool()>& between) {
  std::unique_lock lock(mutex_);
  for (bool more = false;;) {
    changed_.wait(lock, [&] { return more || ends_ || !lines_.empty(); });
    if (ends_) return;
    std::shared_ptr<Unit> unit;
    if (!lines_.empty()) unit = take_next(), running_ = last_;
    lock.unlock();
    if (unit) unit->run();
    unit.reset();
    more = between();
    lock.lock();
    running_.clear();
  }
}

}  // namespace espalier::serve
