#include "tests/cuda/accesses.h"

#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <map>
#include <mutex>
#include <new>

#include "tests/cuda/beside.h"

namespace espalier::emulation {
namespace {

struct Access : Moment {
  std::uint16_t among_others = 0;  // of a read: an Others
  std::uint32_t code = 0;          // the low half of an address
};
// Who else has read, beside the last one: with whom a write cannot be ordered as well.
enum Others : std::uint16_t { nobody = 0, another_lane = 1, another_warp = 2, another_block = 4 };

// Two bytes, the smallest type of the kernels.
constexpr std::uintptr_t kPlaceBytes = 2;
struct Place {
  Access written, read;
};

struct Room {
  std::uintptr_t end, array, array_end;
  Place* places;  // of all the room; pages come when they are touched
  std::uintptr_t begin;
  std::uint32_t first_block = 0;  // of those that have it
  std::size_t bytes() const { return (end - begin) / kPlaceBytes * sizeof(Place); }
};

std::map<std::uintptr_t, Room>& rooms() {
  static auto* const all = new std::map<std::uintptr_t, Room>;
  return *all;
}
// Ranks may be threads that take memory at the same time. Kernels run in one thread.
std::mutex& rooms_change() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}

// Rooms of the pages that were looked at last; rooms are whole pages.
constexpr std::uintptr_t kPage = 4096;
struct Known {
  std::uintptr_t page = 0;
  const Room* room = nullptr;
};
std::array<Known, 256> known;

const Moment* now = nullptr;
Beside* watching = nullptr;  // accesses to [watched_begin, watched_end)
std::uintptr_t watched_begin = 0, watched_end = 0;
std::uint32_t launch_begin = 0, first_block = 0;  // of the room that is looked at: what came before is no matter

const Room* room_of(std::uintptr_t at) {
  Known& entry = known[at / kPage % known.size()];
  if (entry.page != at / kPage) {
    auto room = rooms().upper_bound(at);
    const bool within = room != rooms().begin() && at < (--room)->second.end;
    entry = {at / kPage, within ? &room->second : nullptr};
  }
  return entry.room;
}

bool counts(const Access& before) { return before.block >= first_block; }
bool same_warp(const Moment& a, const Moment& b) { return a.thread / 32 == b.thread / 32; }

bool ordered(const Access& before) {
  if (!counts(before)) return true;
  if (before.block != now->block) return false;
  return before.thread == now->thread || before.barriers != now->barriers ||
         (same_warp(before, *now) && before.warp_barriers != now->warp_barriers);
}

// True if a write now comes after all reads.
bool after_reads(const Access& read) {
  if (!counts(read)) return true;
  if ((read.among_others & another_block) != 0 || !ordered(read)) return false;
  if (read.barriers != now->barriers) return true;
  if ((read.among_others & another_warp) != 0) return false;
  return read.warp_barriers != now->warp_barriers || (read.among_others & another_lane) == 0;
}

// The readers, beside a read now, that a later write would have to come after.
std::uint16_t others_of(const Access& read) {
  if (!counts(read)) return nobody;
  if (read.block != now->block) return another_block;
  const std::uint16_t blocks = read.among_others & another_block;
  if (read.barriers != now->barriers) return blocks;
  const std::uint16_t warps = blocks | (read.among_others & another_warp);
  if (!same_warp(read, *now)) return warps | another_warp;
  if (read.warp_barriers != now->warp_barriers) return warps;
  return warps | (read.among_others & another_lane) | (read.thread != now->thread ? another_lane : nobody);
}

// "file:line", and of what is inlined there, of the instruction before.
std::string place_of(std::uintptr_t code) {
  Dl_info library{};
  if (dladdr(reinterpret_cast<void*>(code), &library) == 0) return "unknown code";
  char command[512], line[512];
  std::snprintf(command, sizeof(command), "addr2line -i -s -e '%s' 0x%zx 2>/dev/null", library.dli_fname,
                code - reinterpret_cast<std::uintptr_t>(library.dli_fbase) - 1);
  std::FILE* const answer = popen(command, "r");
  std::string text;
  while (answer != nullptr && std::fgets(line, sizeof(line), answer) != nullptr) {
    const std::string place(line, std::string(line).find_first_of(" \n"));
    if (text.find(".h:") != std::string::npos || text.empty()) text += (text.empty() ? "" : " in ") + place;
  }
  if (answer != nullptr) pclose(answer);
  return text.empty() ? "unknown code" : text;
}

std::string text_of(const char* what, const Moment& thread, std::uintptr_t code) {
  return "thread " + std::to_string(thread.thread) + " of block " + std::to_string(thread.block - launch_begin) + what +
         place_of(code);
}

[[noreturn]] void race(bool writes, std::uintptr_t code, const char* other, const Access& before) {
  const std::uintptr_t high = code >> 32 << 32;
  const Moment& mine = *now;
  const std::string text = "a race: " + text_of(writes ? " writes at " : " reads at ", mine, code) + " what " +
                           text_of(other, before, high | before.code) +
                           ", and nothing between orders them (blocks in the order they ran)";
  end_of_thread(text);
}

[[noreturn]] void outside(const Room& room, std::uintptr_t at, std::size_t bytes, bool writes, std::uintptr_t code) {
  const std::string beside = at < room.array ? std::to_string(room.array - at) + " bytes before"
                                             : std::to_string(at + bytes - room.array_end) + " bytes past the end of";
  end_of_thread("an access " + beside + " an array of " + std::to_string(room.array_end - room.array) +
                " bytes: " + text_of(writes ? " writes at " : " reads at ", *now, code));
}

[[noreturn]] void misaligned(std::size_t bytes, bool writes, std::uintptr_t code) {
  end_of_thread("an access of " + std::to_string(bytes) + " bytes at an address that is no multiple of that: " +
                text_of(writes ? " writes at " : " reads at ", *now, code));
}

// aligned: of a type whose addresses are multiples of its size. Other ones end a kernel.
void look_at(const void* address, std::size_t bytes, bool writes, const void* code_of, bool aligned = false) {
  if (now == nullptr) return;
  const auto at = reinterpret_cast<std::uintptr_t>(address), code = reinterpret_cast<std::uintptr_t>(code_of);
  if (aligned && at % bytes != 0) misaligned(bytes, writes, code);
  if (watching != nullptr && at >= watched_begin && at < watched_end)
    return watching->access(address, bytes, writes, code_of);
  const Room* const room = room_of(at);
  if (room == nullptr) return;
  if (at < room->array || at + bytes > room->array_end) outside(*room, at, bytes, writes, code);
  first_block = std::max(launch_begin, room->first_block);
  Access mine{*now, nobody, static_cast<std::uint32_t>(code)};
  Place* const last = room->places + (at + bytes - 1 - room->begin) / kPlaceBytes;
  for (Place* place = room->places + (at - room->begin) / kPlaceBytes; place <= last; ++place) {
    if (!ordered(place->written)) race(writes, code, " wrote at ", place->written);
    if (writes) {
      if (!after_reads(place->read)) race(writes, code, " read at ", place->read);
      place->written = mine;
    } else {
      mine.among_others = others_of(place->read);
      place->read = mine;
    }
  }
}

}  // namespace

void add_array(const void* room, std::size_t room_bytes, const void* begin, std::size_t bytes) {
  const auto at = reinterpret_cast<std::uintptr_t>(room), array = reinterpret_cast<std::uintptr_t>(begin);
  Room added{at + room_bytes, array, array + bytes, nullptr, at};
  void* const places =
      mmap(nullptr, added.bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (places == MAP_FAILED) throw std::bad_alloc();
  added.places = static_cast<Place*>(places);
  const std::lock_guard lock(rooms_change());
  rooms()[at] = added;
  known = {};
}

void renew_array(const void* room, std::uint32_t block) {
  rooms().at(reinterpret_cast<std::uintptr_t>(room)).first_block = block;
}

void forget_array(const void* room) {
  const std::lock_guard lock(rooms_change());
  const auto found = rooms().find(reinterpret_cast<std::uintptr_t>(room));
  if (found == rooms().end()) return;
  munmap(found->second.places, found->second.bytes());
  rooms().erase(found);
  known = {};
}

void accesses_of(const Moment* thread, std::uint32_t first) {
  now = thread;
  launch_begin = first;
}

void watch_accesses(Beside* beside, const void* begin, std::size_t bytes) {
  watching = beside;
  watched_begin = reinterpret_cast<std::uintptr_t>(begin), watched_end = watched_begin + bytes;
}
std::string place_of_code(const void* code) { return place_of(reinterpret_cast<std::uintptr_t>(code)); }

void access(const void* at, std::size_t bytes, bool writes, const void* code) { look_at(at, bytes, writes, code); }

}  // namespace espalier::emulation

// Functions that the compiler calls, where ThreadSanitizer itself is not linked.
#if !defined(ESPALIER_EMULATION_TSAN)
#define ESPALIER_CODE __builtin_return_address(0)
#define ESPALIER_ACCESSES(bytes)                                                                                 \
  void __tsan_read##bytes(void* at) { espalier::emulation::look_at(at, bytes, false, ESPALIER_CODE, true); }     \
  void __tsan_write##bytes(void* at) { espalier::emulation::look_at(at, bytes, true, ESPALIER_CODE, true); }     \
  void __tsan_unaligned_read##bytes(void* at) { espalier::emulation::look_at(at, bytes, false, ESPALIER_CODE); } \
  void __tsan_unaligned_write##bytes(void* at) { espalier::emulation::look_at(at, bytes, true, ESPALIER_CODE); }
extern "C" {
ESPALIER_ACCESSES(1)
ESPALIER_ACCESSES(2)
ESPALIER_ACCESSES(4)
ESPALIER_ACCESSES(8)
ESPALIER_ACCESSES(16)
void __tsan_read_range(void* at, std::size_t bytes) { espalier::emulation::look_at(at, bytes, false, ESPALIER_CODE); }
void __tsan_write_range(void* at, std::size_t bytes) { espalier::emulation::look_at(at, bytes, true, ESPALIER_CODE); }
void __tsan_init() {}
// Called by libraries, which count references; kernels have neither virtual functions nor atomics.
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
int __tsan_atomic32_fetch_add(volatile int* at, int add, int) { return __atomic_fetch_add(at, add, __ATOMIC_SEQ_CST); }
}
#endif
