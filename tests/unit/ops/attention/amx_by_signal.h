// Runs the machine code of AMX's tile instructions on a processor that lacks them: each raises SIGILL, and a handler
// does what it says to the registers and the memory of the thread that met it. Slow, a microsecond and more for each.
//
// Known: ldtilecfg, tilerelease, tilezero, tileloadd, tilestored, tdpbf16ps (Intel SDM, volume 2; encodings of the VEX
// map 0F38). Any other illegal instruction ends the process as it would without the handler.
#pragma once

#include <csignal>

namespace espalier::testing {

class AmxBySignal {
 public:
  AmxBySignal();
  ~AmxBySignal();
  AmxBySignal(const AmxBySignal&) = delete;
  AmxBySignal& operator=(const AmxBySignal&) = delete;

  // Instructions run so far, by all threads.
  static long instructions();

 private:
  struct sigaction before_;
};

}  // namespace espalier::testing
