// The interface through which long work reports progress. The library only calls it; the program decides what to show.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace espalier {

// The effect of an interrupt (Ctrl-C, SIGTERM) on reporting work. A second interrupt always ends the program at once.
enum class OnInterrupt {
  stop,    // the next report throws Interrupted; the program ends work that does not report for some seconds
  unwind,  // the next report throws, however late it comes: the caller catches it and saves first
  finish   // nothing is thrown: the work asks interrupted() where it can save and throws by itself
};

struct Interrupted {
  int signal = 0;
  std::string done = {};                          // "after step 3 of 10"; empty: nothing is known
  std::string saved = {};                         // the directory to continue from; empty: there is none
  int exit_code() const { return 128 + signal; }  // what shells expect
};

// One task at a time: begin, any number of advance_to, end. After end, which only clears the screen for other text,
// advance_to may go on with the same task. Calls come from one thread. begin and advance_to may throw to stop the
// work, so callers must be safe to unwind there.
class Progress {
 public:
  virtual ~Progress() = default;

  // total 0: unknown. `unit` is what is counted, in the plural ("rollouts", "bytes", "steps").
  virtual void begin(std::string_view task, std::int64_t total, std::string_view unit) = 0;
  virtual void advance_to(std::int64_t done) = 0;
  virtual void end() = 0;
  virtual void note(std::string_view text) = 0;  // a remark of one line: what was decided, what was ignored

  virtual void part(std::string_view) {}         // the current part of the task, until the next begin; empty: none
  virtual void on_interrupt(OnInterrupt) {}      // from now on; at first `stop`
  virtual int interrupted() const { return 0; }  // the signal that came; 0: none
};

class NoProgress final : public Progress {
 public:
  void begin(std::string_view, std::int64_t, std::string_view) override {}
  void advance_to(std::int64_t) override {}
  void end() override {}
  void note(std::string_view) override {}
};

}  // namespace espalier
