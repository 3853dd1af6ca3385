// Kernel launches, and other uses of the CUDA runtime by operations.
//
// Under nvcc launch() uses CUDA; under a C++ compiler it uses the emulation. The functions of the runtime are in
// runtime.cpp of the CUDA library, and in tests/cuda for the emulation. All work goes to one stream, in order.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#include <cuda_runtime_api.h>
#endif

struct CUstream_st;

namespace espalier::cuda {

using Stream = CUstream_st*;

// The stream of this run's work.
Stream stream();
// The most bytes of shared memory of one block on this GPU.
std::int64_t most_shared_bytes();
// Lets a kernel's blocks have more than 48 KiB of shared memory. Errors: InternalError.
void allow_shared_bytes(const void* kernel, std::int64_t bytes);
// Errors: InternalError with the runtime's message about the previous launch.
void expect_launched(const char* what);

// Device memory for the work of one operation, freed in the order of the stream.
void* take_scratch(std::size_t bytes);
void give_back_scratch(void* memory);

void fill_zero(void* memory, std::size_t bytes);
void copy_on_device(void* to, const void* from, std::size_t bytes);    // the ranges must not overlap
void copy_to_host(void* host, const void* memory, std::size_t bytes);  // returns when it is done

template <class T>
class Scratch {
 public:
  explicit Scratch(std::int64_t count) : memory_(take_scratch(static_cast<std::size_t>(count) * sizeof(T))) {}
  ~Scratch() { give_back_scratch(memory_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  T* get() const { return static_cast<T*>(memory_); }

 private:
  void* memory_;
};

inline std::int64_t ceil_div(std::int64_t count, std::int64_t by) { return (count + by - 1) / by; }

#if defined(__CUDACC__) || defined(ESPALIER_EMULATED)

struct Blocks {
  std::int64_t x = 1, y = 1;
};

// kernel<<<blocks, threads, shared_bytes>>>(arguments...). No blocks: nothing to do.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), Blocks blocks, int threads, std::int64_t shared_bytes,
            const Arguments&... arguments) {
  if (blocks.x == 0 || blocks.y == 0) return;
#ifdef __CUDACC__
  if (shared_bytes > 48 * 1024) allow_shared_bytes(reinterpret_cast<const void*>(kernel), shared_bytes);
  const dim3 grid(static_cast<unsigned>(blocks.x), static_cast<unsigned>(blocks.y));
  kernel<<<grid, static_cast<unsigned>(threads), static_cast<std::size_t>(shared_bytes), stream()>>>(
      static_cast<Parameters>(arguments)...);
  expect_launched(__PRETTY_FUNCTION__);
#else
  const emulation::Launch shape{{static_cast<unsigned>(blocks.x), static_cast<unsigned>(blocks.y)},
                                {static_cast<unsigned>(threads)},
                                static_cast<std::size_t>(shared_bytes)};
  emulation::give(shape, [=] { kernel(static_cast<Parameters>(arguments)...); });
#endif
}

// Threads in whole warps for this number of items, at most `most`.
inline int threads_for(std::int64_t items, int most) {
  const std::int64_t whole = ceil_div(items < 1 ? 1 : items, 32) * 32;
  return static_cast<int>(whole < most ? whole : most);
}

template <class... Pointers>
bool aligned_16(const Pointers*... pointers) {
  return ((reinterpret_cast<std::uintptr_t>(pointers) % 16 == 0) && ...);
}

// Calls body with a pack of 16 bytes of T if possible, else with one element.
template <class T, class Body>
void with_pack(bool possible, Body&& body) {
  constexpr int kWhole = 16 / static_cast<int>(sizeof(T));
  possible ? body.template operator()<kWhole>() : body.template operator()<1>();
}

#endif

}  // namespace espalier::cuda
