#include "espalier/hosting/call_memory.h"

#include <algorithm>
#include <utility>

namespace espalier {

namespace {

constexpr std::size_t kMostSpare = 2;  // arenas whose pages are kept for further calls

}  // namespace

CallMemory::CallMemory(std::int64_t bytes) : bytes_(bytes), decoding_(bytes / 2) {}

void CallMemory::trim_others(const Workspace& own, std::int64_t needed) {
  std::vector<Workspace*> others;
  if (&own != &decoding_) others.push_back(&decoding_);
  for (const auto& workspace : spare_) others.push_back(workspace.get());
  for (Turns* turns : begun_)
    if (&turns->workspace() != &own) others.push_back(&turns->workspace());
  std::int64_t touched = 0;
  for (const Workspace* other : others) touched += other->arena.touched();
  if (touched <= bytes_ - needed) return;
  for (Workspace* other : others) other->arena.trim();
}

CallMemory::Turns::Turns(CallMemory& memory, const Pause& pause) : memory_(memory), pause_(pause) {
  wait_for_lone_call();
  if (memory.spare_.empty()) {
    workspace_ = std::make_unique<Workspace>(memory.bytes_);
  } else {
    workspace_ = std::move(memory.spare_.back());
    memory.spare_.pop_back();
  }
  memory.begun_.push_back(this);
  memory.trim_others(*workspace_, memory.half());
}

CallMemory::Turns::~Turns() {
  if (memory_.alone_ == this) memory_.alone_ = nullptr;
  std::erase(memory_.begun_, this);
  if (memory_.spare_.size() < kMostSpare) memory_.spare_.push_back(std::move(workspace_));
}

// A call that has to run alone begins once the others have ended, so no further one may begin before it.
void CallMemory::Turns::wait_for_lone_call() {
  while (memory_.alone_ != nullptr) pause_();
}

void CallMemory::Turns::pause() {
  if (memory_.alone_ == this) return;
  std::int64_t open = 0;
  for (Turns* turns : memory_.begun_) open += turns->workspace().arena.held();
  if (open > memory_.half()) return;
  pause_();
  memory_.trim_others(*workspace_, memory_.half());
}

void CallMemory::Turns::run_alone() {
  std::erase(memory_.begun_, this);
  wait_for_lone_call();
  memory_.alone_ = this;
  while (!memory_.begun_.empty()) pause_();
  memory_.begun_.push_back(this);
  memory_.trim_others(*workspace_, memory_.bytes_);
}

}  // namespace espalier
