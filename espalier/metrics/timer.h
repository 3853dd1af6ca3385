// The seconds of a piece of work by named parts. Parts never overlap, so parts and rest add up to the total.
#pragma once

#include <chrono>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace espalier {

// While a part runs inside another, only the inner one counts. Not for several threads at once.
class Timer {
 public:
  using Clock = double (*)();  // seconds of a steady clock
  static double steady_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  explicit Timer(Clock clock = steady_seconds) : clock_(clock), began_(clock()), mark_(began_) {}

  double began() const { return began_; }             // by its clock
  double total() const { return clock_() - began_; }  // since construction
  double seconds(std::string_view name) const;        // of a part so far; 0 for a name never used
  double rest() const;                                // total minus all parts
  const std::vector<std::pair<std::string, double>>& parts() const { return parts_; }  // in order of first use

 private:
  friend class TimedPart;
  void enter(std::string_view name);
  void leave();
  void charge();  // the time since the mark goes to the innermost open part

  Clock clock_;
  double began_, mark_;
  std::vector<std::pair<std::string, double>> parts_;
  std::vector<std::size_t> open_;
};

// Counts the time of a block to a part of a timer; nothing where there is no timer.
class [[nodiscard]] TimedPart {
 public:
  TimedPart(Timer& timer, std::string_view name) : TimedPart(&timer, name) {}
  TimedPart(Timer* timer, std::string_view name) : timer_(timer) {
    if (timer_) timer_->enter(name);
  }
  ~TimedPart() {
    if (timer_) timer_->leave();
  }
  TimedPart(const TimedPart&) = delete;
  TimedPart& operator=(const TimedPart&) = delete;

 private:
  Timer* timer_;
};

// The parts of an optimizer step.
namespace part {
inline constexpr std::string_view kPlan = "plan", kProducts = "matrix products", kAttention = "attention",
                                  kRows = "norms, rotations, activations", kHead = "head", kOptimizer = "optimizer",
                                  kCounting = "counting pass", kCommunication = "communication";
}

}  // namespace espalier
