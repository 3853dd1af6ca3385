// The memory of calls that take turns. Each has an arena of its own, in which its open trunks wait while others run.
//
// A call's plan may use half of all bytes, and the other half holds what waiting calls have open, so that every call
// can go on at its turn. A call that needs more than half begins once what others have open leaves it room, and gives
// them their turn wherever both can go on. Decode steps of samplers run between turns, in an arena of half the bytes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "espalier/step/workspace.h"

namespace espalier {

class CallMemory {
 public:
  using Pause = std::function<void()>;

  explicit CallMemory(std::int64_t bytes);

  std::int64_t bytes() const { return bytes_; }
  std::int64_t half() const { return bytes_ / 2; }

  // The arena of decode steps. begin_decoding: before a step, so that all arenas together hold no more than bytes().
  Workspace& decoding() { return decoding_; }
  void begin_decoding() { trim_others(decoding_, half()); }

  // A call, from before its plan to its end. At every change of turns each call that has begun can go on: what it needs
  // fits beside what the others hold open.
  class Turns {
   public:
    // `pause` lets others have their turn; it returns once this call has it again.
    Turns(CallMemory& memory, const Pause& pause);
    ~Turns();
    Turns(const Turns&) = delete;
    Turns& operator=(const Turns&) = delete;

    Workspace& workspace() { return *workspace_; }
    std::int64_t open() const { return workspace_->arena.held(); }  // bytes
    // Before the first row of a plan that holds at most `needed` bytes: returns once there is room for it. `one_item`:
    // it holds nothing when others have their turn, so that it need not wait for calls that came before it.
    void begin(std::int64_t needed, bool one_item);
    // Lets others have their turn, if what this call and all that wait hold open leaves room for them.
    void pause();

   private:
    bool may_begin() const;

    CallMemory& memory_;
    const Pause& pause_;
    std::unique_ptr<Workspace> workspace_;
    std::int64_t needed_ = 0;
    bool one_item_ = false;
  };

 private:
  std::int64_t open_bytes() const;  // held by calls that have begun
  // Gives the system the unused pages of all other arenas, if they hold more than the `needed` bytes leave.
  void trim_others(const Workspace& own, std::int64_t needed);

  std::int64_t bytes_;
  Workspace decoding_;
  std::vector<std::unique_ptr<Workspace>> spare_;  // of calls that have ended
  std::vector<Turns*> begun_;
  std::vector<Turns*> planned_;  // and wait for room; the oldest first
};

}  // namespace espalier
