#include "espalier/metrics/timer.h"

namespace espalier {

void Timer::charge() {
  const double now = clock_();
  if (!open_.empty()) parts_[open_.back()].second += now - mark_;
  mark_ = now;
}

void Timer::enter(std::string_view name) {
  charge();
  std::size_t part = 0;
  while (part < parts_.size() && parts_[part].first != name) ++part;
  if (part == parts_.size()) parts_.emplace_back(name, 0.0);
  open_.push_back(part);
}

void Timer::leave() {
  charge();
  open_.pop_back();
}

double Timer::seconds(std::string_view name) const {
  for (std::size_t part = 0; part < parts_.size(); ++part)
    if (parts_[part].first == name)
      return parts_[part].second + (!open_.empty() && open_.back() == part ? clock_() - mark_ : 0);
  return 0;
}

double Timer::rest() const {
  double rest = clock_() - began_;
  for (const auto& part : parts_) rest -= part.second;
  return open_.empty() ? rest : rest - (clock_() - mark_);
}

}  // namespace espalier
