#include "tests/cuda/hopper/warpgroups.h"

#include <string_view>
#include <utility>

#include "tests/cuda/accesses.h"

namespace espalier::emulation {
namespace {

// These launches run on sm_90a alone.
constexpr Architecture kSm90 = kArchitectures[3];
static_assert(std::string_view(kSm90.name) == "sm_90");

unsigned& blocks_together() {
  static unsigned most = 132;
  return most;
}

}  // namespace

Warpgroups::Warpgroups(const Seat& of, unsigned registers)
    : seat(of),
      actors(of.threads + of.threads / 32 + kMostBarriers),
      threads(of.threads),
      places((of.shared_bytes + 3) / 4),
      products(of.threads / 32),
      group_products((of.threads + kGroupThreads - 1) / kGroupThreads),
      warp_registers(of.threads / 32, registers),
      free_registers(kRegisterFile - registers * of.threads) {
  base = of.number * actors;
  for (unsigned t = 0; t < of.threads; ++t) {
    Knowledge& knows = threads[t].knows;
    knows.until.assign(std::size_t{actors} * of.of, 0), knows.fenced.assign(std::size_t{actors} * of.of, 0);
    knows.until[actor_of_thread(t)] = 1;
  }
}

Warpgroups& warpgroups_now() { return static_cast<Warpgroups&>(beside_now()); }

std::string Warpgroups::name_of_actor(unsigned actor) const {
  const std::string of = actor / actors == seat.number ? "" : " of another block";
  actor %= actors;
  if (actor < seat.threads) return "thread " + std::to_string(actor) + of;
  if (actor < seat.threads + seat.threads / 32) return "a product of warp " + std::to_string(actor - seat.threads) + of;
  return "a copy" + of;
}

std::string Warpgroups::name_of_place(const void* at) const {
  return "shared memory + " + std::to_string(static_cast<const std::byte*>(at) - seat.shared);
}

void Warpgroups::tell(Knowledge& others) {
  ThreadState& thread = me();
  others.join(thread.knows);
  ++thread.knows.until[actor_now()];
}

void Warpgroups::at_block_barrier() {
  Knowledge all;
  for (const ThreadState& thread : threads) all.join(thread.knows);
  for (unsigned t = 0; t < threads.size(); ++t) {
    threads[t].knows.join(all);
    ++threads[t].knows.until[actor_of_thread(t)];
  }
}

void Warpgroups::at_warp_barrier(unsigned warp) {
  Knowledge all;
  for (unsigned lane = 0; lane < 32; ++lane) all.join(threads[warp * 32 + lane].knows);
  for (unsigned lane = 0; lane < 32; ++lane) {
    ThreadState& thread = threads[warp * 32 + lane];
    thread.knows.join(all);
    ++thread.knows.until[actor_of_thread(warp * 32 + lane)];
  }
}

std::string Warpgroups::unknown_reader(const Knowledge& knows, const Place& place) const {
  for (unsigned warp = 0; warp < warp_registers.size(); ++warp) {
    for (unsigned lane = 0; lane < 32; ++lane)
      if ((place.read[warp].lanes >> lane & 1) != 0 &&
          !knows.knows(actor_of_thread(warp * 32 + lane), place.read[warp].moment))
        return "thread " + std::to_string(warp * 32 + lane);
    if (place.product_read[warp] != 0 && !knows.knows(actor_of_products(warp), place.product_read[warp]))
      return "a product of warp " + std::to_string(warp);
  }
  return "";
}

std::optional<std::string> Warpgroups::problem_of_access(unsigned thread, const void* at, std::size_t bytes,
                                                         bool writes) {
  const Knowledge& knows = threads[thread].knows;
  const unsigned actor = actor_of_thread(thread), warp = thread / 32;
  const std::uint32_t moment = knows.until[actor];
  std::optional<std::string> problem;
  const auto begin = reinterpret_cast<std::uintptr_t>(at) & ~std::uintptr_t{3};
  const std::size_t whole = reinterpret_cast<std::uintptr_t>(at) + bytes - begin;
  const bool inside = for_places(reinterpret_cast<const void*>(begin), whole, [&](Place& place) {
    if (problem) return;
    if (place.of_barrier)
      problem = "where a barrier is";
    else if (place.arriving > 0)
      problem = "where a copy is in flight";
    else if (place.writer != kNobody && !knows.knows(place.writer, place.written))
      problem = "what " + name_of_actor(place.writer) + " wrote, and nothing orders the two: a race";
    if (!writes) {
      Place::Reads& reads = place.read[warp];
      if (reads.moment != moment) reads = {moment, 0};
      reads.lanes |= 1u << thread % 32;
      return;
    }
    if (place.in_use > 0) problem = "what a product or a sum in flight reads";
    if (const std::string other = unknown_reader(knows, place); !problem && !other.empty())
      problem = "what " + other + " read, and nothing orders the two: a race";
    place.writer = actor, place.written = moment;
    place.forget_reads();
  });
  if (!inside) problem = "outside of shared memory";
  return problem;
}

void Warpgroups::access(const void* at, std::size_t bytes, bool writes, const void* code) {
  const std::optional<std::string> problem = problem_of_access(thread_now(), at, bytes, writes);
  if (problem)
    end_of_thread("thread " + std::to_string(thread_now()) + (writes ? " writes " : " reads ") + name_of_place(at) +
                  " at " + place_of_code(code) + ", " + *problem);
}

bool Warpgroups::move(std::mt19937& random) {
  if (!copies.empty()) return finish_copy(random() % copies.size()), true;
  if (!adding.empty()) return finish_adding(random() % adding.size()), true;
  return false;
}

void Warpgroups::end() {
  if (!copies.empty()) throw Fault("a block ends with a copy in flight, of " + place(copies[0].site));
  if (!adding.empty()) throw Fault("a block ends with sums in flight");
  for (std::size_t w = 0; w < products.size(); ++w) {
    const WarpProducts& of = products[w];
    if (!of.closed.empty())
      throw Fault("a warp ends with products that nobody waited for, of " + place(of.closed[0].site));
    if (!of.open.products.empty())
      throw Fault("a warp ends with products of no group, of " + place(of.open.products[0].site));
    if (of.issued != group_products[w / 4].size()) throw Fault("warps of a group are in different products");
  }
  for (const NamedBarrier& barrier : named)
    if (barrier.arrived > 0)
      throw Fault("a block ends with " + std::to_string(barrier.arrived) + " threads at a barrier of " +
                  std::to_string(barrier.threads) + ", of " + place(barrier.site));
}

void run(const WarpgroupLaunch& of, const std::function<void()>& body) {
  const dim3& block = of.launch.block;
  const unsigned threads = block.x * block.y * block.z;
  if (threads % 32 != 0 || of.registers % 8 != 0 || of.registers * threads > Warpgroups::kRegisterFile)
    throw Fault("a launch that a GPU does not take: " + std::to_string(threads) + " threads of " +
                std::to_string(of.registers) + " registers");
  if (of.together > most_together())
    throw Fault("a launch of " + std::to_string(of.together) + " blocks that wait for each other on a GPU that holds " +
                std::to_string(most_together()));
  LaunchBeside beside;
  beside.together = of.together;
  beside.beside = [&](const Seat& seat) { return std::make_unique<Warpgroups>(seat, of.registers); };
  forget_turns();
  const Architecture before = architecture();
  set_architecture(kSm90);
  try {
    run(of.launch, beside, body);
  } catch (...) {
    set_architecture(before);
    throw;
  }
  set_architecture(before);
}
unsigned set_most_together(unsigned blocks) { return std::exchange(blocks_together(), blocks); }
unsigned most_together() { return blocks_together(); }
void give(const WarpgroupLaunch& launch, std::function<void()> body) {
  give_work([launch, body = std::move(body)] { run(launch, body); });
}

}  // namespace espalier::emulation
