// Barriers of sm_90a in shared memory that count arrivals and bytes (mbarrier), numbered barriers of some of a block's
// threads, and registers that warpgroups hand on. One function for each instruction, with its twin for the emulation.
#pragma once

#include "espalier/ops/cuda/ptx.h"

namespace espalier::cuda::hopper {

#ifdef __CUDACC__
#define ESPALIER_ONLY_SITE
#else
#define ESPALIER_ONLY_SITE emulation::Site site = emulation::Site::current()
#endif

inline constexpr int kGroupThreads = 128;  // of a warpgroup

// ---- barriers that count: eight bytes each. A phase ends when all arrivals and all bytes have come ----

__device__ __forceinline__ void barrier_init(SharedPlace barrier, int arrivals ESPALIER_TWIN_SITE) {
#ifdef __CUDACC__
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
#else
  emulation::barrier_init(barrier, arrivals, site);
#endif
}
// Between inits and the first use of the barriers by copies.
__device__ __forceinline__ void barrier_init_fence() {
#ifdef __CUDACC__
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#else
  emulation::barrier_init_fence();
#endif
}
__device__ __forceinline__ void barrier_arrive(SharedPlace barrier ESPALIER_TWIN_SITE) {
#ifdef __CUDACC__
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
#else
  emulation::barrier_arrive(barrier, 0, site);
#endif
}
// Arrives, and adds bytes that copies bring to what the phase waits for.
__device__ __forceinline__ void barrier_expect(SharedPlace barrier, int bytes ESPALIER_TWIN_SITE) {
#ifdef __CUDACC__
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
#else
  emulation::barrier_arrive(barrier, bytes, site);
#endif
}
// Returns when the phase of this parity has ended: 0 for the first, third, ... phase.
__device__ __forceinline__ void barrier_wait(SharedPlace barrier, unsigned parity ESPALIER_TWIN_SITE) {
#ifdef __CUDACC__
  asm volatile(
      "{\n.reg .pred p;\nWAIT_%=:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE_%=;\n"
      "bra WAIT_%=;\nDONE_%=:\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
#else
  emulation::barrier_wait(barrier, parity, site);
#endif
}

// Makes this thread's writes to shared memory visible to copies and products.
__device__ __forceinline__ void async_fence() {
#ifdef __CUDACC__
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#else
  emulation::async_fence();
#endif
}

// ---- numbered barriers: 1 to 15, of whole warps ----

__device__ __forceinline__ void named_wait(int number, int threads ESPALIER_TWIN_SITE) {
#ifdef __CUDACC__
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
#else
  emulation::named_barrier(number, threads, true, site);
#endif
}
// Arrives without waiting.
__device__ __forceinline__ void named_arrive(int number, int threads ESPALIER_TWIN_SITE) {
#ifdef __CUDACC__
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
#else
  emulation::named_barrier(number, threads, false, site);
#endif
}

// ---- numbers in global memory by which blocks that are on the GPU together take turns ----

// Returns when the number has this value. Later copies and sums of this thread come behind the copies and sums of the
// threads that passed the turn on.
__device__ __forceinline__ void turn_wait(const int* at, int value ESPALIER_TWIN_SITE) {
#ifdef __CUDACC__
  int seen;
  do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(at) : "memory");
  while (seen != value);
  asm volatile("fence.proxy.async.global;" ::: "memory");
#else
  emulation::wait_for_number(at, value, site);
#endif
}
// Adds 1 to the number, behind what this thread waited for.
__device__ __forceinline__ void turn_pass(int* at ESPALIER_TWIN_SITE) {
#ifdef __CUDACC__
  asm volatile("fence.proxy.async.global;\nred.release.gpu.global.add.s32 [%0], 1;" ::"l"(at) : "memory");
#else
  emulation::add_to_number(at, 1, site);
#endif
}

// ---- registers: the number that each thread of a warpgroup has from now on ----

template <int registers>
__device__ __forceinline__ void give_registers(ESPALIER_ONLY_SITE) {
#ifdef __CUDACC__
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
#else
  emulation::change_registers(registers, false, site);
#endif
}
template <int registers>
__device__ __forceinline__ void take_registers(ESPALIER_ONLY_SITE) {
#ifdef __CUDACC__
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
#else
  emulation::change_registers(registers, true, site);
#endif
}

}  // namespace espalier::cuda::hopper
