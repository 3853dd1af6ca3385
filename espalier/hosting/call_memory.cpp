#include "espalier/hosting/call_memory.h"

#include <algorithm>
#include <utility>

#include "espalier/base/error.h"
#include "espalier/metrics/timer.h"

namespace espalier {

namespace {

constexpr std::size_t kMostSpare = 2;  // arenas whose pages are kept for further calls
// A turn lasts at least so many times as long as memory was moved for it.
constexpr double kWorkForMoving = 2;

}  // namespace

CallMemory::CallMemory(std::int64_t bytes, std::filesystem::path folder)
    : bytes_(bytes), folder_(std::move(folder)), decoding_(bytes / 2) {}

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

bool CallMemory::make_way(const Turns* own, std::int64_t needed) {
  for (;;) {
    std::int64_t open = 0;
    Turns* largest = nullptr;
    for (Turns* turns : begun_) {
      if (turns == own) continue;
      open += turns->open();
      if (largest == nullptr || turns->open() > largest->open()) largest = turns;
    }
    if (open + needed <= bytes_) return true;
    try {
      largest->parked_.emplace(largest->workspace().arena, folder_);
      ++moves_;
    } catch (const Error&) {  // a full disk: what is there now goes on
      return false;
    }
  }
}

std::optional<double> CallMemory::begin_decoding() {
  const Timer timer;
  const std::int64_t before = moves_;
  if (!make_way(nullptr, half())) return {};
  trim_others(decoding_, half());
  return moves_ > before ? kWorkForMoving * timer.total() : 0;
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
  std::erase(memory_.begun_, this);
  if (memory_.spare_.size() < kMostSpare) memory_.spare_.push_back(std::move(workspace_));
}

// The call that had the last turn can always go on: others left it room then, and none of them holds more now.
void CallMemory::Turns::take_memory() {
  const std::int64_t before = memory_.moves_;
  double seconds = 0;
  const auto timed = [&](const auto& work) {
    const Timer timer;
    work();
    seconds += timer.total();
  };
  bool fits = false;
  for (;;) {
    timed([&] { fits = memory_.make_way(this, needed_); });
    if (fits) break;
    let_others();
  }
  const bool moves = parked_ || memory_.moves_ > before;
  if (parked_)
    timed([&] {
      ParkedArena parked = std::move(*parked_);
      parked_.reset();
      parked.come_back();
    });
  turn_ends_ = moves ? Timer::steady_seconds() + kWorkForMoving * seconds : 0;
}

void CallMemory::Turns::let_others() {
  try {
    pause_();
  } catch (...) {
    if (parked_) parked_->drop();
    parked_.reset();
    throw;
  }
}

void CallMemory::Turns::begin(std::int64_t needed, bool one_item) {
  std::erase(memory_.begun_, this);  // a second plan of the same call
  needed_ = std::min(needed, memory_.bytes_), one_item_ = one_item;
  if (!one_item) let_others();  // many rows were planned
  take_memory();
  memory_.begun_.push_back(this);
  memory_.trim_others(*workspace_, needed_);
}

void CallMemory::Turns::pause() {
  if (one_item_ || Timer::steady_seconds() < turn_ends_) return;
  let_others();
  take_memory();
  memory_.trim_others(*workspace_, needed_);
}

}  // namespace espalier
