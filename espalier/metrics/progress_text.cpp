#include "espalier/metrics/progress_text.h"

#include <algorithm>
#include <cmath>

#include "espalier/base/units.h"

namespace espalier {
namespace {

constexpr double kBarSeconds = 0.1;
constexpr double kFirstEstimate = 0.001;  // of the work must be done before its rate says how long the rest takes
constexpr const char* kEraseLine = "\r\x1b[K";

std::string quantity(double amount, const std::string& unit) {
  if (unit == "bytes") return format_bytes(std::llround(amount));
  return format_count(std::llround(amount));
}

std::string bar(double share, std::size_t cells) {
  const auto full = static_cast<std::size_t>(share * static_cast<double>(cells));
  return '[' + std::string(full, '=') + std::string(full < cells ? 1 : 0, '>') +
         std::string(full < cells ? cells - full - 1 : 0, ' ') + ']';
}

}  // namespace

void ProgressText::begin(std::string_view task, std::int64_t total, std::string_view unit) {
  task_ = task;
  unit_ = unit;
  part_.clear();
  total_ = total;
  done_ = 0;
  began_ = shown_ = output_.seconds();
}

void ProgressText::advance_to(std::int64_t done) {
  done_ = done;
  const double now = output_.seconds();
  if (now - shown_ >= (output_.terminal ? kBarSeconds : output_.line_seconds)) show(now);
}

void ProgressText::end() {
  if (drawn_) output_.write(kEraseLine);
  drawn_ = false;
}

void ProgressText::note(std::string_view text) {
  end();
  output_.write(std::string(text) + '\n');
}

void ProgressText::show(double now) {
  shown_ = now;
  if (!output_.terminal) return output_.write(line(now) + '\n');
  output_.write(kEraseLine + line(now));
  drawn_ = true;
}

// "reading  [====>     ]  40 %  400 of 1,000 rollouts, 81 a second, 7.4 s left"
std::string ProgressText::line(double now) const {
  const double elapsed = now - began_;
  const double rate = elapsed > 0 ? static_cast<double>(done_) / elapsed : 0;
  const double share = total_ > 0 ? std::min(1.0, static_cast<double>(done_) / static_cast<double>(total_)) : 0;
  const bool bytes = unit_ == "bytes";
  const bool estimates = total_ <= 0 || share >= kFirstEstimate;
  std::string text = quantity(static_cast<double>(done_), unit_);
  if (total_ > 0) text += " of " + quantity(static_cast<double>(total_), unit_);
  if (!bytes) text += ' ' + unit_;
  // Below three a second whole numbers say too little: the time of one is clearer.
  if (rate >= 3 || bytes)
    text += ", " + quantity(rate, unit_) + " a second";
  else if (rate > 0 && estimates)
    text += ", " + format_seconds(1 / rate) + " each";
  if (done_ < total_ && rate > 0 && estimates)
    text += ", " + format_seconds(static_cast<double>(total_ - done_) / rate) + " left";
  if (!part_.empty()) text += "; " + part_;
  if (total_ <= 0) return task_ + "  " + text;
  const std::string percent = std::to_string(static_cast<int>(100 * share)) + " %";
  if (!output_.terminal) return task_ + ' ' + percent + ": " + text;
  const std::string end = "  " + percent + "  " + text;
  const std::size_t taken = task_.size() + 2 + end.size() + 3;  // with the brackets, and the last column left free
  const std::size_t cells = output_.width > taken + 5 ? std::min<std::size_t>(output_.width - taken, 30) : 0;
  const std::string full = task_ + (cells ? "  " + bar(share, cells) : "") + end;
  return full.substr(0, output_.width > 1 ? output_.width - 1 : 0);  // a wrapped line could not be drawn over
}

}  // namespace espalier
