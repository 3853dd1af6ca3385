#include "espalier/serve/gradient_unit.h"

#include <utility>

namespace espalier::serve {
namespace {

// Tokens of calls that run as one: several waves.
constexpr std::int64_t kMostTokens = 65536;

std::int64_t tokens_of(const TrainingCall& call) {
  std::int64_t tokens = 0;
  for (const TrainingDatum& datum : call.data) tokens += std::ssize(datum.tokens);
  return tokens;
}

}  // namespace

GradientUnit::GradientUnit(Part part, std::optional<RunJournal::Joined> before, bool may_join, Compute compute)
    : before_(before), may_join_(may_join), compute_(std::move(compute)), tokens_(tokens_of(*part.call)) {
  parts_.push_back(std::move(part));
}

bool GradientUnit::joins(const Unit& next) const {
  const auto* other = dynamic_cast<const GradientUnit*>(&next);
  if (other == nullptr || !parts_.front().call->backward || !other->parts_.front().call->backward) return false;
  const std::int64_t number = other->parts_.front().number;
  if (before_) return number <= before_->last;
  return may_join_ && !other->before_ && number == parts_.back().number + 1 && tokens_ + other->tokens_ <= kMostTokens;
}

void GradientUnit::take(std::shared_ptr<Unit> next) {
  auto& other = static_cast<GradientUnit&>(*next);
  tokens_ += other.tokens_;
  for (Part& part : other.parts_) parts_.push_back(std::move(part));
}

}  // namespace espalier::serve
