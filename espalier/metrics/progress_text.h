// Progress as text: a bar with rate and time left on a terminal, now and then a plain line elsewhere.
#pragma once

#include <functional>
#include <string>

#include "espalier/metrics/progress.h"

namespace espalier {

class ProgressText final : public Progress {
 public:
  struct Output {
    std::function<void(std::string_view)> write;  // where the text goes
    std::function<double()> seconds;              // a steady clock
    bool terminal = false;                        // a bar that is drawn over, at most ten times a second
    std::size_t width = 80;                       // columns of the terminal
    double line_seconds = 5;                      // at least this long between two plain lines of a task
  };
  explicit ProgressText(Output output) : output_(std::move(output)) {}

  void begin(std::string_view task, std::int64_t total, std::string_view unit) override;
  void advance_to(std::int64_t done) override;
  void end() override;  // the bar is taken away; the result speaks for itself
  void note(std::string_view text) override;
  void part(std::string_view text) override { part_ = text; }  // shown with the next report

 private:
  void show(double now);
  std::string line(double now) const;

  Output output_;
  std::string task_, unit_, part_;
  std::int64_t total_ = 0, done_ = 0;
  double began_ = 0, shown_ = 0;
  bool drawn_ = false;  // a bar stands on the current line of the terminal
};

}  // namespace espalier
