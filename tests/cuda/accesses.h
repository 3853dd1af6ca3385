// Checks the accesses of a grid's threads, one at a time. Faults: an access outside of its array, one at an address
// that is no multiple of its type's size, and two accesses of different threads to one place, one of them a write, that
// nothing orders, whatever order they ran in.
//
// A barrier of their block orders two accesses of a launch that it stands between; in a warp so does a __syncwarp of
// all lanes. Nothing orders two blocks. Launches come one after the other.
//
// The compiler calls the functions of accesses.cpp before every access of a kernel (-fsanitize=thread, whose library is
// not linked). Memory that no array was told of is not looked at: stacks, arguments of kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace espalier::emulation {

// A thread of a grid, as far as it has come.
struct Moment {
  std::uint32_t block = 0;   // number among the blocks of all launches, from 1
  std::uint16_t thread = 0;  // of the block
  // Barriers that it has met, modulo 2^16: an access with exactly 2^16 between is not told from one with none.
  std::uint16_t barriers = 0, warp_barriers = 0;
};

// Nobody may touch the room but in [begin, begin + bytes), from an even address on; rooms are whole pages.
void add_array(const void* room, std::size_t room_bytes, const void* begin, std::size_t bytes);
void forget_array(const void* room);
// From this block on it is another's: shared memory that is used again.
void renew_array(const void* room, std::uint32_t block);

// Sets whose accesses follow: a thread's, in a launch whose blocks are numbered from first_block on; null: nobody's.
void accesses_of(const Moment* thread, std::uint32_t first_block);
// One of the thread's, by the instruction before `code`. Does not return where it is a fault.
void access(const void* at, std::size_t bytes, bool writes, const void* code);
// Accesses to a range of memory are told to the work beside a block instead; null: no longer.
class Beside;
void watch_accesses(Beside* beside, const void* begin, std::size_t bytes);
// Ends the thread with a fault; `what` of emulation.cpp.
[[noreturn]] void end_of_thread(const std::string& what);

}  // namespace espalier::emulation
