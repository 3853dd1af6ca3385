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

std::int64_t CallMemory::open_bytes() const {
  std::int64_t open = 0;
  for (const Turns* turns : begun_) open += turns->open();
  return open;
}

CallMemory::Turns::Turns(CallMemory& memory, const Pause& pause) : memory_(memory), pause_(pause) {
  if (memory.spare_.empty()) {
    workspace_ = std::make_unique<Workspace>(memory.bytes_);
  } else {
    workspace_ = std::move(memory.spare_.back());
    memory.spare_.pop_back();
  }
}

CallMemory::Turns::~Turns() {
  std::erase(memory_.planned_, this);
  std::erase(memory_.begun_, this);
  if (memory_.spare_.size() < kMostSpare) memory_.spare_.push_back(std::move(workspace_));
}

// Calls of several items begin in their order, so that one that needs much is not overtaken again and again. None of
// them begins where it could not pause: everybody else would wait for all of its items.
bool CallMemory::Turns::may_begin() const {
  if (needed_ + memory_.open_bytes() > memory_.bytes_) return false;
  if (one_item_) return true;
  return memory_.planned_.front() == this && std::ranges::all_of(memory_.begun_, [&](const Turns* other) {
           return other->needed_ + needed_ <= memory_.bytes_;
         });
}

void CallMemory::Turns::begin(std::int64_t needed, bool one_item) {
  std::erase(memory_.begun_, this);  // a second plan of the same call
  needed_ = std::min(needed, memory_.bytes_), one_item_ = one_item;
  memory_.planned_.push_back(this);
  if (!one_item) pause_();  // many rows were planned
  while (!may_begin()) pause_();
  std::erase(memory_.planned_, this);
  memory_.begun_.push_back(this);
  memory_.trim_others(*workspace_, needed_);
}

void CallMemory::Turns::pause() {
  if (one_item_) return;
  const std::int64_t open = memory_.open_bytes();
  if (open > memory_.half()) return;
  for (const Turns* other : memory_.begun_)
    if (other != this && other->needed_ + open - other->open() > memory_.bytes_) return;
  pause_();
  memory_.trim_others(*workspace_, needed_);
}

}  // namespace espalier
