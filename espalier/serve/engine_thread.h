// The one thread that owns all tensors. Units of work wait in lines, one for each training model and one for samplers;
// lines take turns, so that no client waits longer than one unit of every other. Between units, and while none waits,
// samples are decoded, a step at a time.
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

// A piece of work. It must not throw.
class Unit {
 public:
  virtual ~Unit() = default;
  virtual void run() = 0;
  // True if the unit that follows in the line, and waits, can be a part of this one; takes it.
  virtual bool joins(const Unit&) const { return false; }
  virtual void take(std::shared_ptr<Unit>) {}
};

class EngineThread {
 public:
  using Work = std::function<void()>;

  // `begin` runs first. `between` runs after every unit, and again and again while it returns true.
  EngineThread(Work begin, std::function<bool()> between);
  ~EngineThread();  // ends after the unit that runs; waiting units are dropped
  EngineThread(const EngineThread&) = delete;
  EngineThread& operator=(const EngineThread&) = delete;

  // Units of one line run in the order in which they were given. Units that come together can be joined for certain.
  // Any thread.
  void add(const std::string& line, std::vector<std::shared_ptr<Unit>> units);
  void add(const std::string& line, Work work) { add(line, {unit(std::move(work))}); }
  static std::shared_ptr<Unit> unit(Work work);
  std::int64_t waiting() const;
  std::string running() const;  // the line whose unit runs; empty: none does

 private:
  void run(const std::function<bool()>& between);
  std::shared_ptr<Unit> take_next();

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::deque<std::shared_ptr<Unit>>> lines_;  // none is empty
  std::string last_;                                                // the line that had the last turn
  std::string running_;
  std::int64_t waiting_ = 0;
  bool ends_ = false;
  std::thread thread_;  // the last member: it uses the others
};

}  // namespace espalier::serve
