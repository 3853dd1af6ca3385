// What a long piece of work tells whoever watches it. The library only calls it; the program decides what is shown.
#pragma once

#include <cstdint>
#include <string_view>

namespace espalier {

// One task at a time: begin, any number of advance_to, end. After end, which only clears the screen for other text,
// advance_to may go on with the same task. Calls come from one thread. advance_to may throw to stop the work (the
// program does so on an interrupt), so callers must be safe to unwind there.
class Progress {
 public:
  virtual ~Progress() = default;

  // total 0: unknown. `unit` is what is counted, in the plural ("rollouts", "bytes", "steps").
  virtual void begin(std::string_view task, std::int64_t total, std::string_view unit) = 0;
  virtual void advance_to(std::int64_t done) = 0;
  virtual void end() = 0;
  virtual void note(std::string_view text) = 0;  // a remark of one line: what was decided, what was ignored
};

class NoProgress final : public Progress {
 public:
  void begin(std::string_view, std::int64_t, std::string_view) override {}
  void advance_to(std::int64_t) override {}
  void end() override {}
  void note(std::string_view) override {}
};

}  // namespace espalier
