#include "espalier/serve/engine_thread.h"

#include <utility>

namespace espalier::serve {

namespace {

class PlainUnit final : public Unit {
 public:
  PlainUnit(EngineThread::Work work, bool pauses) : work_(std::move(work)), pauses_(pauses) {}
  void run() override { work_(); }
  bool pauses() const override { return pauses_; }

 private:
  EngineThread::Work work_;
  bool pauses_;
};

}  // namespace

// A thread with a stack of its own for a unit that pauses. It and the engine's thread never run at the same time: one
// waits while the other has the turn.
class EngineThread::Runner {
 public:
  explicit Runner(const Work& begin)
      : thread_([this, begin] {
          begin();
          serve_units();
        }) {}

  ~Runner() {
    {
      const std::lock_guard lock(mutex_);
      ends_ = true, has_turn_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  Runner(const Runner&) = delete;
  Runner& operator=(const Runner&) = delete;

  // Begins the unit, or goes on with it. Returns when it pauses or has ended.
  void start(std::shared_ptr<Unit> unit) {
    unit_ = std::move(unit);
    go_on();
  }
  void go_on() {
    std::unique_lock lock(mutex_);
    has_turn_ = true;
    changed_.notify_all();
    changed_.wait(lock, [&] { return !has_turn_; });
  }
  bool is_busy() const { return unit_ != nullptr; }  // while the other thread has the turn
  // The paused unit ends with Stopped.
  void stop() {
    stops_ = true;
    go_on();
  }

  // On this runner's thread.
  void pause() {
    give_back_turn();
    if (stops_) throw Stopped{};
  }

 private:
  void serve_units() {
    wait_for_turn();
    while (!ends_) {
      try {
        unit_->run();
      } catch (const Stopped&) {  // its results are not wanted
      }
      unit_.reset();
      give_back_turn();
    }
  }

  void wait_for_turn() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return has_turn_; });
  }
  void give_back_turn() {
    std::unique_lock lock(mutex_);
    has_turn_ = false;
    changed_.notify_all();
    changed_.wait(lock, [&] { return has_turn_; });
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool has_turn_ = false, ends_ = false;
  bool stops_ = false;
  std::shared_ptr<Unit> unit_;  // of the caller that has the turn
  std::thread thread_;          // the last member: it uses the others
};

EngineThread::EngineThread(Work begin, std::function<bool()> between)
    : begin_(std::move(begin)), thread_([this, between = std::move(between)] {
        begin_();
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
    std::deque<std::shared_ptr<Unit>>& of_line = lines_[line].units;
    for (std::shared_ptr<Unit>& unit : units) of_line.push_back(std::move(unit));
  }
  changed_.notify_one();
}

EngineThread::Hold::Hold(EngineThread& thread) : thread_(thread) {
  const std::lock_guard lock(thread_.mutex_);
  thread_.is_held_ = true;
}

EngineThread::Hold::~Hold() {
  {
    const std::lock_guard lock(thread_.mutex_);
    thread_.is_held_ = false;
  }
  thread_.changed_.notify_one();
}

std::shared_ptr<Unit> EngineThread::unit(Work work, bool pauses) {
  return std::make_shared<PlainUnit>(std::move(work), pauses);
}

std::int64_t EngineThread::waiting() const {
  const std::lock_guard lock(mutex_);
  return waiting_;
}

std::string EngineThread::running() const {
  const std::lock_guard lock(mutex_);
  return running_;
}

bool EngineThread::has_begun(const std::string& line) const {
  const std::lock_guard lock(mutex_);
  const auto found = lines_.find(line);
  return found != lines_.end() && found->second.paused != nullptr;
}

void EngineThread::pause() {
  Runner* runner = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (ends_) throw Stopped{};
    bool others = more_between_;
    for (const auto& [name, line] : lines_) others = others || name != last_;
    if (!others) return;
    runner = runner_;
  }
  runner->pause();
}

// The lock is held.
std::shared_ptr<Unit> EngineThread::take_next(std::deque<std::shared_ptr<Unit>>& units) {
  const auto pop = [&] {
    std::shared_ptr<Unit> unit = std::move(units.front());
    units.pop_front();
    --waiting_;
    return unit;
  };
  std::shared_ptr<Unit> unit = pop();
  while (!units.empty() && unit->joins(*units.front())) unit->take(pop());
  return unit;
}

// The turn of the line that follows the last one.
void EngineThread::take_turn(std::unique_lock<std::mutex>& lock) {
  auto line = lines_.upper_bound(last_);
  if (line == lines_.end()) line = lines_.begin();
  last_ = running_ = line->first;
  std::unique_ptr<Runner> runner = std::move(line->second.paused);
  std::shared_ptr<Unit> unit;
  if (!runner) {
    unit = take_next(line->second.units);
    if (unit->pauses() && !spare_.empty()) {
      runner = std::move(spare_.back());
      spare_.pop_back();
    } else if (unit->pauses()) {
      runner = std::make_unique<Runner>(begin_);
    }
  }
  if (line->second.units.empty()) lines_.erase(line);
  runner_ = runner.get();
  lock.unlock();
  if (!runner)
    unit->run();
  else if (unit)
    runner->start(std::move(unit));
  else
    runner->go_on();
  unit.reset();
  lock.lock();
  runner_ = nullptr;
  if (!runner) return;
  if (runner->is_busy())
    lines_[last_].paused = std::move(runner);
  else
    spare_.push_back(std::move(runner));
}

void EngineThread::run(const std::function<bool()>& between) {
  std::unique_lock lock(mutex_);
  for (;;) {
    const auto has_turn = [&] { return !is_held_ && !lines_.empty(); };
    changed_.wait(lock, [&] { return more_between_ || ends_ || has_turn(); });
    if (ends_) break;
    if (has_turn()) take_turn(lock);
    lock.unlock();
    const bool more = between();
    lock.lock();
    more_between_ = more;
    running_.clear();
  }
  lock.unlock();
  for (auto& [name, line] : lines_)
    if (line.paused) line.paused->stop();
}

}  // namespace espalier::serve
