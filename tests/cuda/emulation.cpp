#include "tests/cuda/emulation.h"

#include <sys/mman.h>

#include <array>
#include <cstdlib>
#include <exception>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "tests/cuda/accesses.h"
#include "tests/cuda/beside.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#else
#define ASAN_UNPOISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
static void __sanitizer_start_switch_fiber(void**, const void*, std::size_t) {}
static void __sanitizer_finish_switch_fiber(void*, const void**, std::size_t*) {}
#endif

#if defined(ESPALIER_EMULATION_TSAN)
extern "C" {
void __tsan_acquire(void*);
void __tsan_release(void*);
void __tsan_ignore_thread_begin();
void __tsan_ignore_thread_end();
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned);
void __tsan_destroy_fiber(void*);
void __tsan_switch_to_fiber(void*, unsigned);
void __tsan_read_range(void*, unsigned long);
void __tsan_write_range(void*, unsigned long);
}
#else
static void __tsan_acquire(void*) {}
static void __tsan_release(void*) {}
static void __tsan_ignore_thread_begin() {}
static void __tsan_ignore_thread_end() {}
static void* __tsan_get_current_fiber() { return nullptr; }
static void* __tsan_create_fiber(unsigned) { return nullptr; }
static void __tsan_destroy_fiber(void*) {}
static void __tsan_switch_to_fiber(void*, unsigned) {}
static void __tsan_read_range(void*, unsigned long) {}
static void __tsan_write_range(void*, unsigned long) {}
#endif
static constexpr unsigned kNoOrder = 1;  // of __tsan_switch_to_fiber: what ran before does not come before

// void espalier_switch_stack(void** save, void* to): leaves one stack for another; the registers that a call keeps are
// on the stack that is left.
extern "C" void espalier_switch_stack(void** save, void* to);
asm(R"(
.text
.globl espalier_switch_stack
.type espalier_switch_stack,@function
espalier_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size espalier_switch_stack,.-espalier_switch_stack
)");

namespace espalier::emulation {

std::string place(const Site& site) {
  const char* const slash = std::strrchr(site.file_name(), '/');
  return std::string(slash != nullptr ? slash + 1 : site.file_name()) + ":" + std::to_string(site.line());
}

namespace {

constexpr std::size_t kStackBytes = 256 << 10, kGuardBytes = 4096;
Architecture architecture_now = kArchitectures[0];

// Accesses by the emulation itself, on a thread's behalf or its own, are not the kernel's.
struct Unseen {
  Unseen() { __tsan_ignore_thread_begin(); }
  ~Unseen() { __tsan_ignore_thread_end(); }
};

// An operation of one warp, from the first lane that arrives until all have read the result.
struct Operation {
  const char* name = nullptr;
  unsigned arrived = 0, unread = 0;
  Site site;
  Exchange data;
};

struct Copy {
  void* to;
  const void* from;
  int written, bytes, group;
};

std::uint32_t blocks_run = 0;  // of all launches

enum class State { ready, at_barrier, in_warp, waiting, ended };

struct Block;

struct Fiber {
  ThreadView view;
  State state = State::ready;
  Site site;
  const char* operation_name = nullptr;
  unsigned warp = 0;
  Block* block = nullptr;
  std::function<bool()> until;  // where it waits for work beside the block, and the reason
  std::string waits_for;
  void* stack_pointer = nullptr;
  std::byte* stack = nullptr;
  void* sanitizer = nullptr;
  void* seen_as = nullptr;  // the thread that ThreadSanitizer takes it for
  Moment moment;
  Operation* operation = nullptr;  // the one it waits in or has last read from
  std::vector<Copy> copies;        // in flight
  int groups = 0;                  // of copies, committed so far
};

struct SharedKey {
  const char* file;
  unsigned line, column;
  auto operator<=>(const SharedKey&) const = default;
};

#if defined(__SANITIZE_ADDRESS__) || defined(ESPALIER_EMULATION_TSAN)
// Exactly `bytes` bytes, so that a sanitizer sees accesses past them and forgets what was there before.
std::byte* take_memory(std::size_t bytes) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 128, bytes) != 0) throw std::bad_alloc();
  return static_cast<std::byte*>(memory);
}
void give_back_memory(std::byte* memory, std::size_t) { std::free(memory); }
#else
// At a multiple of 16, at most 15 bytes before pages that nobody may touch, and behind some. Used again for other
// blocks.
std::map<std::size_t, std::vector<std::byte*>>& memory_kept() {
  static auto* const kept = new std::map<std::size_t, std::vector<std::byte*>>;
  return *kept;
}
std::byte* take_memory(std::size_t bytes) {
  std::vector<std::byte*>& kept = memory_kept()[bytes];
  if (kept.empty()) {
    constexpr std::size_t kAround = 256 << 10;  // more than a block has
    const std::size_t whole = (bytes + 15) / 16 * 16, pages = (whole + kGuardBytes - 1) / kGuardBytes * kGuardBytes;
    void* const memory =
        mmap(nullptr, kAround + pages + kAround, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    std::byte* const begin = static_cast<std::byte*>(memory) + kAround;
    mprotect(begin, pages, PROT_READ | PROT_WRITE);
    kept.push_back(begin + pages - whole);
    add_array(begin, pages, kept.back(), bytes);
  }
  std::byte* const taken = kept.back();
  kept.pop_back();
  renew_array(reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(taken) / kGuardBytes * kGuardBytes), blocks_run);
  return taken;
}
void give_back_memory(std::byte* memory, std::size_t bytes) { memory_kept()[bytes].push_back(memory); }
#endif

// Memory of one block: NaN in every floating type at its start.
class Memory {
 public:
  Memory() = default;
  explicit Memory(std::size_t bytes) : memory_(take_memory(bytes)), bytes_(bytes) { std::memset(memory_, 0xff, bytes); }
  Memory(const Memory&) = delete;
  Memory& operator=(Memory&& other) noexcept {
    std::swap(memory_, other.memory_), std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Memory() {
    if (memory_ != nullptr) give_back_memory(memory_, bytes_);
  }
  std::byte* get() const { return memory_; }
  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* memory_ = nullptr;
  std::size_t bytes_ = 0;
};

// Dynamic shared memory whose accesses are told to the work beside a block: at a multiple of 1024, with room around it
// that is none of it.
class BesideMemory {
 public:
  static constexpr std::size_t kAround = 4096;
  explicit BesideMemory(std::size_t bytes) : bytes_((bytes + kAround - 1) / kAround * kAround + 2 * kAround) {
    memory_ = static_cast<std::byte*>(std::aligned_alloc(kAround, bytes_));
    if (memory_ == nullptr) throw std::bad_alloc();
    std::memset(memory_, 0xff, bytes_);
  }
  BesideMemory(const BesideMemory&) = delete;
  BesideMemory& operator=(const BesideMemory&) = delete;
  ~BesideMemory() { std::free(memory_); }
  std::byte* get() const { return memory_ + kAround; }
  std::byte* room() const { return memory_; }
  std::size_t room_bytes() const { return bytes_; }

 private:
  std::size_t bytes_;
  std::byte* memory_;
};

struct Block {
  std::vector<Fiber> fibers;
  // Addresses that order accesses to memory: one for a barrier of the block and one for the next; two for each warp.
  std::vector<char> order;
  unsigned barriers = 0;
  std::vector<Operation*> pending;  // of each warp: the one that lanes are arriving at
  std::map<SharedKey, Memory> shared;
  Memory dynamic;
  std::unique_ptr<BesideMemory> watched;  // in place of `dynamic` where there is work beside the block
  std::unique_ptr<Beside> beside;
  std::size_t all_shared_bytes = 0;  // dynamic bytes, and the bytes of objects that threads have come by

  std::byte* shared_bytes() const { return watched != nullptr ? watched->get() : dynamic.get(); }
};

// The stacks of a launch's fibers, each with a page below it that nobody may touch. For ThreadSanitizer each
// has a thread of its own, and blocks take turns with four sets of them: nothing orders a block and the next three.
constexpr std::size_t kSets = 4;
class Stacks {
 public:
  std::byte* at(std::size_t set, std::size_t thread) {
    std::vector<std::byte*>& stacks = sets_[set].stacks;
    while (stacks.size() <= thread) {
      void* memory = mmap(nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory == MAP_FAILED) throw std::bad_alloc();
      mprotect(memory, kGuardBytes, PROT_NONE);
      stacks.push_back(static_cast<std::byte*>(memory) + kGuardBytes);
    }
    return stacks[thread];
  }
  void* seen_as(std::size_t set, std::size_t thread) {
    std::vector<void*>& threads = sets_[set].threads;
    while (threads.size() <= thread) threads.push_back(__tsan_create_fiber(0));
    return threads[thread];
  }
  // After a fault: they have not returned from what they were in.
  void forget_threads() {
    for (auto& [number, set] : sets_) {
      for (void* const thread : set.threads) __tsan_destroy_fiber(thread);
      set.threads.clear();
    }
  }

 private:
  struct Set {
    std::vector<std::byte*> stacks;
    std::vector<void*> threads;
  };
  std::map<std::size_t, Set> sets_;
};

unsigned seed_now = 1;
std::mt19937 random_of_launch;
std::uint32_t first_block = 0;  // of the launch
std::map<std::string, std::int64_t> counters;
std::int64_t switches = 0;
Block* block_now = nullptr;
Fiber* fiber_now = nullptr;
const std::function<void()>* body_now = nullptr;
void* scheduler_stack = nullptr;
void* scheduler_sanitizer = nullptr;
void* scheduler_seen_as = nullptr;
char launch_begins, launch_ends;  // addresses: each thread comes after the one, and before the other
const void* scheduler_bottom = nullptr;
std::size_t scheduler_size = 0;
std::exception_ptr fault;  // of a thread of the block
std::vector<std::unique_ptr<Operation>> all_operations;
std::vector<Operation*> free_operations;

Stacks& stacks() {
  static auto* const kept = new Stacks;
  return *kept;
}

Operation* take_operation() {
  if (free_operations.empty()) {
    all_operations.push_back(std::make_unique<Operation>());
    free_operations.push_back(all_operations.back().get());
  }
  Operation* const taken = free_operations.back();
  free_operations.pop_back();
  return taken;
}

void leave_operation(Fiber& fiber) {
  if (fiber.operation == nullptr) return;
  fiber.operation->unread &= ~(1u << fiber.view.lane);
  if (fiber.operation->unread == 0) free_operations.push_back(fiber.operation);
  fiber.operation = nullptr;
}

void to_scheduler() {
  Fiber& fiber = *fiber_now;
  __sanitizer_start_switch_fiber(fiber.state == State::ended ? nullptr : &fiber.sanitizer, scheduler_bottom,
                                 scheduler_size);
  __tsan_switch_to_fiber(scheduler_seen_as, kNoOrder);
  espalier_switch_stack(&fiber.stack_pointer, scheduler_stack);
  __sanitizer_finish_switch_fiber(fiber.sanitizer, &scheduler_bottom, &scheduler_size);
}

void fiber_main() {
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_bottom, &scheduler_size);
  __tsan_acquire(&launch_begins);
  try {
    (*body_now)();
    if (!fiber_now->copies.empty()) fail("a thread ends with a copy in flight that nobody waited for", Site::current());
  } catch (...) {
    if (!fault) fault = std::current_exception();
  }
  __tsan_release(&launch_ends);
  {
    const Unseen unseen;
    leave_operation(*fiber_now);
  }
  fiber_now->state = State::ended;
  to_scheduler();
  std::abort();
}

void resume(Fiber& fiber) {
  ++switches;
  fiber_now = &fiber;
  block_now = fiber.block;
  __sanitizer_start_switch_fiber(&scheduler_sanitizer, fiber.stack, kStackBytes);
  __tsan_switch_to_fiber(fiber.seen_as, kNoOrder);
  accesses_of(&fiber.moment, first_block);
  if (block_now->beside != nullptr)
    watch_accesses(block_now->beside.get(), block_now->watched->room(), block_now->watched->room_bytes());
  espalier_switch_stack(&scheduler_stack, fiber.stack_pointer);
  accesses_of(nullptr, first_block);
  watch_accesses(nullptr, nullptr, 0);
  __sanitizer_finish_switch_fiber(scheduler_sanitizer, nullptr, nullptr);
  fiber_now = nullptr;
}

std::string text_of(const dim3& at) {
  return "(" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " + std::to_string(at.z) + ")";
}

// Lists where the threads are.
std::string whereabouts(const Block& block) {
  std::map<std::string, std::pair<int, unsigned>> groups;  // place -> threads there, the first of them
  for (unsigned i = 0; i < block.fibers.size(); ++i) {
    const Fiber& fiber = block.fibers[i];
    const std::string where =
        fiber.state == State::ended        ? "ended"
        : fiber.state == State::at_barrier ? "wait at the barrier of " + place(fiber.site)
        : fiber.state == State::in_warp    ? "wait in " + std::string(fiber.operation_name) + " of " + place(fiber.site)
        : fiber.state == State::waiting    ? "wait for " + fiber.waits_for + " at " + place(fiber.site)
                                           : "run";
    ++groups.try_emplace(where, 0, i).first->second.first;
  }
  std::string text = " in block " + text_of(block.fibers[0].view.block);
  for (const auto& [where, threads] : groups)
    text += "; " + std::to_string(threads.first) + " threads (first: " + std::to_string(threads.second) + ") " + where;
  return text;
}

// `stacks_of`: the set of stacks that the block runs on.
Fiber fiber_of(const Launch& launch, Block& of, std::size_t stacks_of, unsigned block, unsigned thread) {
  const dim3 &b = launch.block, &g = launch.grid;
  Fiber fiber;
  fiber.view = {{thread % b.x, thread / b.x % b.y, thread / (b.x * b.y)},
                {block % g.x, block / g.x % g.y, block / (g.x * g.y)},
                b,
                g,
                thread % 32};
  fiber.warp = thread / 32;
  fiber.block = &of;
  fiber.stack = stacks().at(stacks_of, thread);
  fiber.seen_as = stacks().seen_as(stacks_of, thread);
  fiber.moment = {.block = blocks_run, .thread = static_cast<std::uint16_t>(thread)};
  // As espalier_switch_stack left it: six registers, the address it returns to, and rsp 8 below a multiple of 16.
  void** const top = reinterpret_cast<void**>(fiber.stack + kStackBytes) - 1;
  top[0] = nullptr;
  top[-1] = reinterpret_cast<void*>(&fiber_main);
  fiber.stack_pointer = top - 7;
  return fiber;
}

// All threads that have not ended wait: at one barrier, or for ever.
void open_barrier(Block& block) {
  const Fiber* first = nullptr;
  for (const Fiber& fiber : block.fibers) {
    if (fiber.state != State::at_barrier)
      throw Fault("a barrier or a warp operation that not all threads reach" + whereabouts(block));
    if (first == nullptr) first = &fiber;
    if (fiber.site.line() != first->site.line() || fiber.site.column() != first->site.column())
      throw Fault("threads wait at different barriers" + whereabouts(block));
  }
  ++block.barriers;
  if (block.beside != nullptr) block.beside->at_block_barrier();
  for (Fiber& fiber : block.fibers) fiber.state = State::ready;
}

bool can_run(const Fiber& fiber) {
  return fiber.state == State::ready || (fiber.state == State::waiting && fiber.until());
}

// The blocks that are on the GPU together.
using Blocks = std::vector<std::unique_ptr<Block>>;

struct OneWarp {  // the one that runs ahead
  const Block* block = nullptr;
  unsigned warp = 0;
};

std::vector<Fiber*> ready_threads(const Blocks& blocks, const OneWarp& only) {
  std::vector<Fiber*> ready;
  for (const auto& block : blocks) {
    if (only.block != nullptr && block.get() != only.block) continue;
    for (Fiber& fiber : block->fibers)
      if ((only.block == nullptr || fiber.warp == only.warp) && can_run(fiber)) ready.push_back(&fiber);
  }
  return ready;
}

// Does what is in flight beside the blocks: by the seed at once, as late as it can be, or now and then. Returns whether
// something was done.
bool move_beside(const Blocks& blocks, bool threads_wait, std::mt19937& random) {
  const unsigned haste = seed_now % 3;
  bool moved = false;
  for (const auto& block : blocks) {
    if (block->beside == nullptr) continue;
    if (!threads_wait && haste != 0 && (haste == 1 || random() % 4 != 0)) continue;
    block_now = block.get();
    moved = block->beside->move(random) || moved;
    if (moved && threads_wait) break;
  }
  return moved;
}

// Where no thread can run: opens the barriers that all threads of a block have reached.
void open_barriers(const Blocks& blocks) {
  bool opened = false;
  for (const auto& block : blocks) {
    const auto all = [&](State state) {
      return std::all_of(block->fibers.begin(), block->fibers.end(), [&](const Fiber& f) { return f.state == state; });
    };
    const bool some_wait = std::any_of(block->fibers.begin(), block->fibers.end(),
                                       [](const Fiber& f) { return f.state == State::waiting; });
    block_now = block.get();
    if (all(State::at_barrier) || (blocks.size() == 1 && !some_wait && !all(State::ended)))
      open_barrier(*block), opened = true;
  }
  if (opened) return;
  std::string text;
  for (const auto& block : blocks) text += whereabouts(*block);
  throw Fault("threads that wait for ever" + text);
}

void run_blocks(const Blocks& blocks, std::mt19937& random) {
  const bool ahead = seed_now % 2 != 0;
  const auto some_run = [&] {
    return std::any_of(blocks.begin(), blocks.end(), [](const auto& block) {
      return std::any_of(block->fibers.begin(), block->fibers.end(),
                         [](const Fiber& fiber) { return fiber.state != State::ended; });
    });
  };
  OneWarp only;
  while (some_run()) {
    std::vector<Fiber*> ready = ready_threads(blocks, only);
    if (ready.empty() && only.block != nullptr) {
      only = {};
      ready = ready_threads(blocks, only);
    }
    const bool moved = move_beside(blocks, ready.empty(), random);
    if (ready.empty()) {
      if (!moved) open_barriers(blocks);
      continue;
    }
    if (seed_now != 0) std::shuffle(ready.begin(), ready.end(), random);
    if (ahead && only.block == nullptr) {
      only = {ready[0]->block, ready[0]->warp};
      continue;
    }
    for (Fiber* const fiber : ready) {
      if (can_run(*fiber)) resume(*fiber);
      if (fault) std::rethrow_exception(fault);
    }
  }
  for (const auto& block : blocks) {
    block_now = block.get();
    if (block->beside != nullptr) block->beside->end();
  }
}

void expect_launchable(const Launch& launch) {
  const std::uint64_t threads = std::uint64_t{launch.block.x} * launch.block.y * launch.block.z;
  const dim3& grid = launch.grid;
  if (threads == 0 || threads > 1024 || launch.block.z > 64 || launch.shared_bytes > architecture_now.shared_bytes ||
      grid.x == 0 || grid.x > 0x7fffffffu || grid.y == 0 || grid.y > 65535 || grid.z == 0 || grid.z > 65535)
    throw Fault(std::string("a launch that ") + architecture_now.name + " does not take: grid " + text_of(grid) +
                ", block " + text_of(launch.block) + ", " + std::to_string(launch.shared_bytes) +
                " bytes of shared memory");
}

}  // namespace

namespace {
std::function<void(std::function<void()>)>& launches() {
  static std::function<void(std::function<void()>)> stream;
  return stream;
}
}  // namespace

void set_architecture(const Architecture& architecture) { architecture_now = architecture; }
const Architecture& architecture() { return architecture_now; }

void take_launches(std::function<void(std::function<void()>)> stream) { launches() = std::move(stream); }
void give_work(std::function<void()> work) { launches() ? launches()(std::move(work)) : work(); }
void give(const Launch& launch, std::function<void()> body) {
  give_work([launch, body = std::move(body)] { run(launch, body); });
}

void set_seed(unsigned seed) { seed_now = seed; }
std::int64_t counter(const std::string& name) { return name == "switches" ? switches : counters[name]; }
void reset_counters() {
  counters.clear();
  switches = 0;
}
void count(const char* name, std::int64_t amount) {
  const Unseen unseen;
  counters[name] += amount;
}
const ThreadView& self() { return fiber_now->view; }

void fail(const std::string& what, Site site) {
  const ThreadView& view = fiber_now->view;
  throw Fault(what + " at " + place(site) + ", block " + text_of(view.block) + " thread " + text_of(view.thread));
}

void end_here(const std::string& what, Site site) {
  const ThreadView& view = fiber_now->view;
  end_of_thread(what + " at " + place(site) + ", block " + text_of(view.block) + " thread " + text_of(view.thread));
}

void end_of_thread(const std::string& what) {
  fault = std::make_exception_ptr(Fault(what));  // where it is, nothing may be thrown
  to_scheduler();
  std::abort();
}

void barrier(Site site) {
  const Unseen unseen;
  void* const order = &block_now->order[block_now->barriers % 2];
  __tsan_release(order);
  ++fiber_now->moment.barriers;
  fiber_now->state = State::at_barrier;
  fiber_now->site = site;
  to_scheduler();
  __tsan_acquire(order);
}

namespace {
const Exchange& exchange_with(const char* name, unsigned mask, const void* value, std::size_t bytes, Site site,
                              const std::function<void(const Exchange&)>* last) {
  const Unseen unseen;
  Fiber& fiber = *fiber_now;
  const unsigned bit = 1u << fiber.view.lane;
  if ((mask & bit) == 0) fail("a lane calls a warp operation whose mask leaves it out", site);
  leave_operation(fiber);
  Operation*& pending = block_now->pending[fiber.warp];
  fiber.site = site;
  fiber.operation_name = name;
  if (pending == nullptr) {
    pending = take_operation();
    pending->name = name, pending->site = site, pending->arrived = 0;
    pending->data.mask = pending->unread = mask;
  } else if (pending->data.mask != mask || std::strcmp(pending->name, name) != 0) {
    fail("lanes of a warp are in different operations: " + std::string(name) + ", and " + pending->name + " of " +
             place(pending->site),
         site);
  }
  Operation* const operation = fiber.operation = pending;
  if (bytes > 0) std::memcpy(operation->data.words[fiber.view.lane], value, bytes);
  operation->arrived |= bit;
  // Among warp operations only __syncwarp orders accesses to memory: of all lanes, as no kernel asks for some.
  void* const order = std::strcmp(name, "syncwarp") == 0 && mask == ~0u
                          ? &block_now->order[2 + 2 * fiber.warp + fiber.moment.warp_barriers++ % 2]
                          : nullptr;
  if (order != nullptr) __tsan_release(order);
  if (operation->arrived == mask) {
    pending = nullptr;
    if (last != nullptr) (*last)(operation->data);
    if (order != nullptr && block_now->beside != nullptr) block_now->beside->at_warp_barrier(fiber.warp);
    const unsigned first = fiber.warp * 32;
    for (unsigned lane = 0; lane < 32; ++lane)
      if ((mask >> lane & 1) != 0 && first + lane < block_now->fibers.size())
        block_now->fibers[first + lane].state = State::ready;
  } else {
    fiber.state = State::in_warp;
    to_scheduler();
  }
  if (order != nullptr) __tsan_acquire(order);
  return operation->data;
}
}  // namespace

const Exchange& exchange(const char* name, unsigned mask, const void* value, std::size_t bytes, Site site) {
  return exchange_with(name, mask, value, bytes, site, nullptr);
}
void exchange_and(const char* name, const void* value, std::size_t bytes, Site site,
                  const std::function<void(const Exchange&)>& all) {
  exchange_with(name, ~0u, value, bytes, site, &all);
}

unsigned thread_now() { return static_cast<unsigned>(fiber_now - block_now->fibers.data()); }
Beside& beside_now() { return *block_now->beside; }
std::mt19937& random_now() { return random_of_launch; }
unsigned seed_of_launch() { return seed_now; }

void wait_until(const std::function<bool()>& condition, const std::string& what, Site site) {
  if (condition()) return;
  const Unseen unseen;
  Fiber& fiber = *fiber_now;
  fiber.until = condition, fiber.waits_for = what, fiber.site = site;
  fiber.state = State::waiting;
  to_scheduler();
  fiber.state = State::ready;
}

void* shared_object(std::size_t bytes, Site site) {
  const Unseen unseen;
  Memory& memory = block_now->shared[{site.file_name(), site.line(), site.column()}];
  if (memory.get() == nullptr) {
    memory = Memory(bytes);
    if ((block_now->all_shared_bytes += bytes) > architecture_now.shared_bytes)
      fail(std::string("more shared memory than a block has on ") + architecture_now.name, site);
  }
  if (memory.bytes() != bytes) fail("two objects of shared memory share a place in the source", site);
  return memory.get();
}

void* dynamic_shared_bytes() { return block_now->shared_bytes(); }

void begin_copy(void* to, const void* from, int written, int bytes, Site site) {
  const auto all = static_cast<std::size_t>(written);
  expect_aligned(to, all, site);
  expect_aligned(from, all, site);
  for (const Copy& copy : fiber_now->copies)
    if (copy.to == to) fail("a copy to where another one is in flight", site);
  access(to, all, true, __builtin_return_address(0));
  __tsan_write_range(to, all);
  const Unseen unseen;
  std::memset(to, 0xff, all);
  fiber_now->copies.push_back({to, from, written, bytes, fiber_now->groups});
}

void commit_copies() { ++fiber_now->groups; }

void wait_for_copies(int groups_left) {
  auto& copies = fiber_now->copies;
  const auto landed = [&](const Copy& copy) { return copy.group < fiber_now->groups - groups_left; };
  for (const Copy& copy : copies) {
    if (!landed(copy)) continue;
    const auto all = static_cast<std::size_t>(copy.written), bytes = static_cast<std::size_t>(copy.bytes);
    access(copy.to, all, true, __builtin_return_address(0));
    if (bytes > 0) access(copy.from, bytes, false, __builtin_return_address(0));
    __tsan_write_range(copy.to, all);
    __tsan_read_range(const_cast<void*>(copy.from), bytes);
    const Unseen unseen;
    std::memset(copy.to, 0, all);
    if (bytes > 0) std::memcpy(copy.to, copy.from, bytes);
  }
  std::erase_if(copies, landed);
}

namespace {
std::unique_ptr<Block> block_of(const Launch& launch, const LaunchBeside* of, unsigned number, unsigned together,
                                unsigned at) {
  const unsigned threads = launch.block.x * launch.block.y * launch.block.z;
  auto block = std::make_unique<Block>();
  ++blocks_run;
  const std::size_t stacks_of = together > 1 ? kSets + number : blocks_run % kSets;
  for (unsigned t = 0; t < threads; ++t) block->fibers.push_back(fiber_of(launch, *block, stacks_of, at, t));
  block->pending.resize((threads + 31) / 32);
  block->all_shared_bytes = launch.shared_bytes;
  block->order.resize(2 + 2 * block->pending.size());
  if (of != nullptr) {
    block->watched = std::make_unique<BesideMemory>(launch.shared_bytes);
    block->beside = of->beside({number, together, threads, block->watched->get(), launch.shared_bytes});
  } else if (launch.shared_bytes > 0) {
    block->dynamic = Memory(launch.shared_bytes);
  }
  return block;
}

void run_all(const Launch& launch, const LaunchBeside* of, const std::function<void()>& body) {
  expect_launchable(launch);
  const Unseen unseen;
  count("launches", 1);
  const unsigned blocks = launch.grid.x * launch.grid.y * launch.grid.z, together = of != nullptr ? of->together : 1;
  std::mt19937& random = random_of_launch;
  random.seed(seed_now);
  std::vector<unsigned> order(blocks);
  for (unsigned i = 0; i < blocks; ++i) order[i] = i;
  if (seed_now != 0 && together == 1) std::shuffle(order.begin(), order.end(), random);
  body_now = &body;
  first_block = blocks_run + 1;
  fault = nullptr;
  __tsan_release(&launch_begins);
  scheduler_seen_as = __tsan_get_current_fiber();
  for (unsigned next = 0; next < blocks;) {
    const unsigned count = std::min(together, blocks - next);
    Blocks all;
    for (unsigned i = 0; i < count; ++i) all.push_back(block_of(launch, of, i, count, order[next + i]));
    next += count;
    try {
      run_blocks(all, random);
    } catch (...) {  // what the other threads hold on their stacks is left as it is
      for (const auto& block : all)
        for (const Fiber& fiber : block->fibers) ASAN_UNPOISON_MEMORY_REGION(fiber.stack, kStackBytes);
      block_now = nullptr, fault = nullptr;
      free_operations.clear(), all_operations.clear();
      stacks().forget_threads();
      throw;
    }
    block_now = nullptr;
  }
  __tsan_acquire(&launch_ends);
}
}  // namespace

void run(const Launch& launch, const std::function<void()>& body) { run_all(launch, nullptr, body); }
void run(const Launch& launch, const LaunchBeside& of, const std::function<void()>& body) {
  run_all(launch, &of, body);
}

}  // namespace espalier::emulation
