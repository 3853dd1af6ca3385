// Barriers that count, numbered barriers, and registers that warpgroups hand on.
#include "tests/cuda/hopper/warpgroups.h"

namespace espalier::emulation {
namespace {

// mbarrier.try_wait.parity: a phase of this parity is over where the present one has the other parity.
bool is_over(const CountedBarrier& barrier, unsigned parity) {
  return (barrier.phase & 1) != static_cast<std::int64_t>(parity);
}

constexpr std::int64_t kMostBytes = (1 << 20) - 1;  // of a barrier's pending bytes

}  // namespace

void end_phase_if_complete(CountedBarrier& barrier) {
  if (barrier.pending > 0 || barrier.bytes != 0) return;
  ++barrier.phase;
  barrier.pending = barrier.expected;
  std::swap(barrier.ended, barrier.arriving);
  barrier.arriving = Knowledge();
}

CountedBarrier& Warpgroups::counted_at(void* at, Site site) {
  const auto found = counted.find(at);
  if (found == counted.end()) fail("a barrier that nobody has made", site);
  CountedBarrier& barrier = found->second;
  if (!me().knows.knows(barrier.init_thread, barrier.init_moment))
    fail("a barrier whose init this thread cannot know of", site);
  return barrier;
}

void barrier_init(void* at, int arrivals, Site site) {
  Warpgroups& block = warpgroups_now();
  expect_aligned(at, 8, site);
  if (block.counted.size() == Warpgroups::kMostBarriers) fail("more barriers than the emulation counts", site);
  if (block.counted.contains(at)) fail("a barrier that is there already", site);
  if (!block.for_places(at, 8, [](Place& place) { place.of_barrier = true; }))
    fail("a barrier outside of shared memory", site);
  if (arrivals < 1) fail("a barrier without arrivals", site);
  const unsigned actor =
      block.base + block.seat.threads + block.seat.threads / 32 + static_cast<unsigned>(block.counted.size());
  block.counted[at] = {.at = at,
                       .expected = arrivals,
                       .pending = arrivals,
                       .arriving = {},
                       .ended = {},
                       .actor = actor,
                       .init_thread = block.actor_now(),
                       .init_moment = block.me().knows.until[block.actor_now()]};
}
void barrier_init_fence() {
  Warpgroups& block = warpgroups_now();
  for (auto& [at, barrier] : block.counted)
    if (barrier.init_thread == block.actor_now()) barrier.known_to_copies = true;
}

void barrier_arrive(void* at, int bytes, Site site) {
  Warpgroups& block = warpgroups_now();
  CountedBarrier& barrier = block.counted_at(at, site);
  if (barrier.pending == 0) fail("more arrivals than a barrier counts", site);
  block.tell(barrier.arriving);
  --barrier.pending;
  barrier.bytes += bytes;
  if (barrier.bytes > kMostBytes || barrier.bytes < -kMostBytes) fail("more bytes than a barrier counts", site);
  end_phase_if_complete(barrier);
}

void barrier_wait(void* at, unsigned parity, Site site) {
  if (parity > 1) fail("a parity that there is not", site);
  Warpgroups& block = warpgroups_now();
  CountedBarrier& barrier = block.counted_at(at, site);
  ThreadState& me = block.me();
  const auto last = me.passed.try_emplace(&barrier, -2).first;
  const std::int64_t next = last->second + ((last->second & 1) == static_cast<std::int64_t>(parity) ? 2 : 1);
  wait_until([&] { return is_over(barrier, parity); },
             "a barrier (" + block.name_of_place(at) + ", parity " + std::to_string(parity) + ")", site);
  if (barrier.phase - 1 != next)
    fail("a wait for phase " + std::to_string(next) + " of a barrier (" + block.name_of_place(at) +
             ") that goes on when " + std::to_string(barrier.phase) + " phases have ended",
         site);
  last->second = next;
  me.knows.join(barrier.ended);
}

void async_fence() {
  Warpgroups& block = warpgroups_now();
  Knowledge& knows = block.me().knows;
  knows.fenced[block.actor_now()] = knows.until[block.actor_now()];
}

void named_barrier(int id, int threads, bool waits, Site site) {
  Warpgroups& block = warpgroups_now();
  if (id < 1 || id >= static_cast<int>(Warpgroups::kNamedBarriers))
    fail("a barrier with a number that there is not, or the block's", site);
  if (threads % 32 != 0) fail("a barrier of part of a warp", site);
  NamedBarrier& named = block.named[static_cast<std::size_t>(id)];
  if (named.arrived > 0 && named.threads != threads)
    fail("a barrier of " + std::to_string(threads) + " threads where " + place(named.site) + " counts " +
             std::to_string(named.threads),
         site);
  named.threads = threads, named.site = site;
  block.tell(named.arriving);
  const std::int64_t round = named.round;
  if (++named.arrived == threads) {
    named.ended[round] = named.arriving;
    named.arriving = Knowledge(), named.arrived = 0, ++named.round;
  }
  if (!waits) return;
  wait_until([&] { return named.round > round; }, "barrier number " + std::to_string(id), site);
  block.me().knows.join(named.ended.at(round));
}

void change_registers(unsigned registers, bool takes, Site site) {
  Warpgroups& block = warpgroups_now();
  const unsigned warp = thread_now() / 32;
  exchange_and("setmaxnreg", &registers, sizeof(registers), site, [&](const Exchange&) {
    unsigned& has = block.warp_registers[warp];
    if (registers < 24 || registers > 256 || registers % 8 != 0) fail("a number of registers that there is not", site);
    if (takes ? registers < has : registers > has) fail("registers given by taking, or taken by giving", site);
    if (!takes) block.free_registers += (has - registers) * 32, has = registers;
  });
  if (!takes) return;
  if (self().lane == 0) {  // for its warp; the other lanes wait for it
    const unsigned wanted = (registers - block.warp_registers[warp]) * 32;
    wait_until([&] { return block.free_registers >= wanted; }, "registers", site);
    block.free_registers -= wanted;
    block.warp_registers[warp] = registers;
  }
  exchange_and("setmaxnreg", &registers, sizeof(registers), site, [](const Exchange&) {});
}

}  // namespace espalier::emulation
