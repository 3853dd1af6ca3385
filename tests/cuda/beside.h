// Internal to the emulation: what runs beside the threads of a block, and how threads wait for it. Copies of whole
// tiles and products of warpgroups (tests/cuda/hopper/) run this way.
#pragma once

#include <memory>
#include <random>

#include "tests/cuda/emulation.h"

namespace espalier::emulation {

// The work beside one block. Its members are called between threads, or by the thread that runs.
class Beside {
 public:
  virtual ~Beside() = default;
  // Does one thing that is in flight; false if nothing is. Errors: Fault.
  virtual bool move(std::mt19937& random) = 0;
  virtual void at_block_barrier() = 0;              // all threads have arrived
  virtual void at_warp_barrier(unsigned warp) = 0;  // all lanes have arrived
  virtual void access(const void* at, std::size_t bytes, bool writes, const void* code) = 0;  // to shared memory
  virtual void end() = 0;  // after the last thread. Errors: Fault for work that is left
};

// A block's place among the blocks that are on the GPU together, and its dynamic shared memory.
struct Seat {
  unsigned number, of;
  unsigned threads;
  std::byte* shared;
  std::size_t shared_bytes;
};

struct LaunchBeside {
  unsigned together = 1;  // more: blocks start in their order, as on a GPU
  std::function<std::unique_ptr<Beside>(const Seat& seat)> beside;
};
void run(const Launch& launch, const LaunchBeside& of, const std::function<void()>& body);
// When its turn comes, where a stream takes launches (take_launches), else now.
void give_work(std::function<void()> work);

// The running thread: its number in its block, and the work beside it.
unsigned thread_now();
Beside& beside_now();
std::mt19937& random_now();
unsigned seed_of_launch();
// Stops the running thread until the condition holds; `what` names the reason where it never does.
void wait_until(const std::function<bool()>& condition, const std::string& what, Site site);
// As exchange() of a whole warp. The last lane that arrives calls `all` before the others go on.
void exchange_and(const char* operation, const void* value, std::size_t bytes, Site site,
                  const std::function<void(const Exchange&)>& all);
// Ends the running thread with a fault where nothing may be thrown.
[[noreturn]] void end_here(const std::string& what, Site site);

std::string place(const Site& site);
// "file:line" of an instruction, with the places that it was inlined into.
std::string place_of_code(const void* code);

}  // namespace espalier::emulation
