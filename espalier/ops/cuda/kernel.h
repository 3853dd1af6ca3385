// The language of kernels: CUDA under nvcc; under a C++ compiler the emulation included before this header.
//
// T is the stored type (float, double or bfloat16), A = accumulator_t<T> the type of arithmetic. Sums over a warp or a
// block have one order under any schedule.
#pragma once

#include <cmath>
#include <cstdint>

#include "espalier/base/dtype.h"

#ifdef __CUDACC__
#include <cuda_bf16.h>
#define ESPALIER_SHARED(Type, name) __shared__ typename ::espalier::cuda::SharedType<Type>::type name
#else
#define ESPALIER_SHARED(Type, name)                                              \
  auto& name = *static_cast<typename ::espalier::cuda::SharedType<Type>::type*>( \
      ::espalier::emulation::shared_object(sizeof(Type), ::espalier::emulation::Site::current()))
#endif

namespace espalier::cuda {

template <class T>
struct SharedType {
  using type = T;
};

inline constexpr unsigned kWholeWarp = 0xffffffffu;

// ---- numbers ----

__device__ __forceinline__ float widened(float x) { return x; }
__device__ __forceinline__ double widened(double x) { return x; }
__device__ __forceinline__ float widened(bfloat16 x) {
#ifdef __CUDACC__
  return __uint_as_float(static_cast<unsigned>(x.bits) << 16);
#else
  return static_cast<float>(x);
#endif
}

template <class T>
struct Narrow {
  static __device__ __forceinline__ T of(T x) { return x; }
};
template <>
struct Narrow<bfloat16> {
  static __device__ __forceinline__ bfloat16 of(float x) {
#ifdef __CUDACC__
    bfloat16 narrow;
    narrow.bits = __bfloat16_as_ushort(__float2bfloat16_rn(x));
    return narrow;
#else
    return bfloat16(x);
#endif
  }
};
// To nearest, ties to even.
template <class T>
__device__ __forceinline__ T narrowed(accumulator_t<T> x) {
  return Narrow<T>::of(x);
}
// x rounded to T.
template <class T>
__device__ __forceinline__ accumulator_t<T> rounded(accumulator_t<T> x) {
  return widened(narrowed<T>(x));
}
// From any of the stored types to any other, rounded once.
template <class Out, class In>
__device__ __forceinline__ Out converted(In x) {
  return Narrow<Out>::of(static_cast<accumulator_t<Out>>(widened(x)));
}

// ---- 16 bytes at a time ----

template <class T>
inline constexpr int kPackOf = 16 / static_cast<int>(sizeof(T));

template <class T, int kPack>
struct alignas(kPack * sizeof(T) < 16 ? kPack * sizeof(T) : 16) Pack {
  T x[kPack];
};

template <int kPack, class T>
__device__ __forceinline__ Pack<T, kPack> load_pack(const T* at) {
#ifndef __CUDACC__
  emulation::expect_aligned(at, alignof(Pack<T, kPack>), emulation::Site::current());
#endif
  return *reinterpret_cast<const Pack<T, kPack>*>(at);
}
template <int kPack, class T>
__device__ __forceinline__ void store_pack(T* at, const Pack<T, kPack>& pack) {
#ifndef __CUDACC__
  emulation::expect_aligned(at, alignof(Pack<T, kPack>), emulation::Site::current());
#endif
  *reinterpret_cast<Pack<T, kPack>*>(at) = pack;
}

// ---- threads ----

template <class T>
__device__ __forceinline__ T* dynamic_shared() {
#ifdef __CUDACC__
  extern __shared__ __align__(128) unsigned char espalier_dynamic_shared[];
  return reinterpret_cast<T*>(espalier_dynamic_shared);
#else
  return static_cast<T*>(emulation::dynamic_shared_bytes());
#endif
}

// Number of this thread in the grid.
__device__ __forceinline__ std::int64_t grid_thread() {
  return static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

// Sums over groups of kLanes neighbouring lanes. Every lane of the warp calls it and gets its group's sum.
template <int kLanes = 32, class A>
__device__ __forceinline__ A warp_sum(A x) {
#pragma unroll
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) x += __shfl_xor_sync(kWholeWarp, x, lanes);
  return x;
}
template <class A>
__device__ __forceinline__ A warp_max(A x) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    const A other = __shfl_xor_sync(kWholeWarp, x, lanes);
    x = other > x ? other : x;
  }
  return x;
}

// The sum over a block of whole warps, in every thread. `scratch` belongs to this function until the next barrier.
template <class A>
__device__ __forceinline__ A block_sum(A x, A (&scratch)[32]) {
  const unsigned lane = threadIdx.x % 32, warps = blockDim.x / 32;
  x = warp_sum(x);
  __syncthreads();  // scratch may still be read from the call before
  if (lane == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  return warp_sum(lane < warps ? scratch[lane] : A(0));
}

}  // namespace espalier::cuda
