// The one thread that owns all tensors. Units of work wait in lines, one for each training model and one for the rest;
// lines take turns, so that no client waits longer than one unit of every other.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>

namespace espalier::serve {

class EngineThread {
 public:
  using Unit = std::function<void()>;  // must not throw

  // `begin` runs first.
  explicit EngineThread(Unit begin);
  ~EngineThread();  // ends after the unit that runs; waiting units are dropped
  EngineThread(const EngineThread&) = delete;
  EngineThread& operator=(const EngineThread&) = delete;

  // Units of one line run in the order in which they were given. Any thread.
  void add(const std::string& line, Unit unit);
  std::int64_t waiting() const;

 private:
  void run();

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::deque<Unit>> lines_;  // none is empty
  std::string last_;                               // the line that had the last turn
  std::int64_t waiting_ = 0;
  bool ends_ = false;
  std::thread thread_;  // the last member: it uses the others
};

}  // namespace espalier::serve
