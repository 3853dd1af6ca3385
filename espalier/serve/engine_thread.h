// The one thread that owns all tensors. Units of work wait in lines, one for each training model and one for samplers;
// lines take turns. A long unit pauses between its parts, so that no line waits longer than one part of every other.
// Between turns, and while none waits, samples are decoded, a step at a time.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace espalier::serve {

// A piece of work. It must not throw, except for what pause() throws.
class Unit {
 public:
  virtual ~Unit() = default;
  virtual void run() = 0;
  // True if it calls EngineThread::pause.
  virtual bool pauses() const { return false; }
  // True if the unit that follows in the line, and waits, can be a part of this one; takes it.
  virtual bool joins(const Unit&) const { return false; }
  virtual void take(std::shared_ptr<Unit>) {}
};

class EngineThread {
 public:
  using Work = std::function<void()>;
  // Thrown by pause() when the server ends: the unit's results are not wanted any more.
  struct Stopped {};

  // `begin` runs first, on each thread that runs units. `between` runs after every turn, and again and again while it
  // returns true.
  EngineThread(Work begin, std::function<bool()> between);
  ~EngineThread();  // ends after the part that runs; waiting units are dropped
  EngineThread(const EngineThread&) = delete;
  EngineThread& operator=(const EngineThread&) = delete;

  // Units of one line run in the order in which they were given. Units that come together can be joined for certain.
  // Any thread.
  void add(const std::string& line, std::vector<std::shared_ptr<Unit>> units);
  void add(const std::string& line, Work work) { add(line, {unit(std::move(work))}); }
  static std::shared_ptr<Unit> unit(Work work, bool pauses = false);
  std::int64_t waiting() const;
  std::string running() const;                    // the line whose unit runs; empty: none does
  bool has_begun(const std::string& line) const;  // its first unit has, and pauses now

  // While it lives, no unit begins, so that units given one after the other are given together. One at a time.
  class Hold {
   public:
    explicit Hold(EngineThread& thread);
    ~Hold();
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;

   private:
    EngineThread& thread_;
  };

  // Called by a unit that pauses(), between two parts of its work: returns when its line has its next turn, at once if
  // nobody else waits. Units of other lines have run meanwhile. Errors: Stopped.
  void pause();

 private:
  class Runner;
  struct Line {
    std::deque<std::shared_ptr<Unit>> units;
    std::unique_ptr<Runner> paused;  // runs the unit before them; null: none has begun
  };

  void run(const std::function<bool()>& between);
  void take_turn(std::unique_lock<std::mutex>& lock);
  std::shared_ptr<Unit> take_next(std::deque<std::shared_ptr<Unit>>& units);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Work begin_;
  std::map<std::string, Line> lines_;           // each has something to do
  std::vector<std::unique_ptr<Runner>> spare_;  // without a unit
  Runner* runner_ = nullptr;                    // whose turn it is; null: the unit runs on this thread
  std::string last_;                            // the line that had the last turn
  std::string running_;
  std::int64_t waiting_ = 0;
  bool more_between_ = false, ends_ = false, is_held_ = false;
  std::thread thread_;  // the last member: it uses the others
};

}  // namespace espalier::serve
