// The memory of calls that take turns. Each has an arena of its own, in which its open trunks wait while others run.
//
// A call's plan may use half of all bytes, or all where half is too little. A call that has its turn and does not find
// the memory that it needs beside what waiting calls hold open moves their content to a store, from which each brings
// its own back at its turn. So no call waits for another one's end. A call for which memory was moved keeps its turn
// for some time, so that most of the time is work. Decode steps of samplers run between turns, in an arena of half the
// bytes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "espalier/hosting/parked_arena.h"
#include "espalier/step/workspace.h"

namespace espalier {

class CallMemory {
 public:
  using Pause = std::function<void()>;

  // `folder`: for the content of calls whose memory others need, as store_of.
  CallMemory(std::int64_t bytes, std::filesystem::path folder);

  std::int64_t bytes() const { return bytes_; }
  std::int64_t half() const { return bytes_ / 2; }
  std::int64_t moves() const { return moves_; }  // times that a call's content went to the store

  // The arena of decode steps. begin_decoding: before them, so that all arenas together hold no more than bytes().
  // Returns the seconds for which they may go on before the next call has its turn; none: there is no memory for them
  // now.
  Workspace& decoding() { return decoding_; }
  std::optional<double> begin_decoding();

  // A call, from before its plan to its end.
  class Turns {
   public:
    // `pause` lets others have their turn; it returns once this call has it again.
    Turns(CallMemory& memory, const Pause& pause);
    ~Turns();
    Turns(const Turns&) = delete;
    Turns& operator=(const Turns&) = delete;

    Workspace& workspace() { return *workspace_; }
    // Before the first row of a plan that holds at most `needed` bytes: returns once there is room for it. `one_item`:
    // others have no turn before its end.
    void begin(std::int64_t needed, bool one_item);
    // Lets others have their turn. Errors: what `pause` throws, which must end the call; InputError if the store lost
    // what was moved there.
    void pause();

   private:
    friend class CallMemory;
    std::int64_t open() const { return workspace_->arena.held(); }  // bytes
    void let_others();
    void take_memory();

    CallMemory& memory_;
    const Pause& pause_;
    std::unique_ptr<Workspace> workspace_;
    std::int64_t needed_ = 0;
    bool one_item_ = false;
    std::optional<ParkedArena> parked_;
    double turn_ends_ = 0;  // not before this time, where memory was moved for it
  };

 private:
  // Moves what calls other than `own` (null: all) hold open to the store, the largest first, until they leave `needed`
  // bytes. False: the store has no room.
  bool make_way(const Turns* own, std::int64_t needed);
  // Gives the system the unused pages of all other arenas, if they hold more than the `needed` bytes leave.
  void trim_others(const Workspace& own, std::int64_t needed);

  std::int64_t bytes_, moves_ = 0;
  std::filesystem::path folder_;
  Workspace decoding_;
  std::vector<std::unique_ptr<Workspace>> spare_;  // of calls that have ended
  std::vector<Turns*> begun_;
};

}  // namespace espalier
