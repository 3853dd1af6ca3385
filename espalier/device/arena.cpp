#include "espalier/device/arena.h"

#include <ATen/ops/from_blob.h>
#include <sys/mman.h>

#include "espalier/base/error.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#endif

namespace espalier {
Arena::Arena(std::int64_t limit_bytes) : limit_(limit_bytes) {
  void* memory = mmap(nullptr, static_cast<std::size_t>(limit_), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED)
    throw MemoryBudgetError({"Arena", text_of("an address range of ", limit_, " bytes"), "a refusal of the system",
                             "lower --memory-budget or raise the limit on address space (ulimit -v)"});
  base_ = static_cast<std::byte*>(memory);
  ASAN_POISON_MEMORY_REGION(base_, limit_);
}

Arena::~Arena() {
  ASAN_UNPOISON_MEMORY_REGION(base_, limit_);
  munmap(base_, static_cast<std::size_t>(limit_));
}

at::Tensor Arena::take(at::IntArrayRef sizes, at::ScalarType dtype) {
  std::int64_t bytes = static_cast<std::int64_t>(c10::elementSize(dtype));
  for (std::int64_t size : sizes) bytes *= size;
  bytes = bytes_taken(bytes);
  if (top_ + bytes > limit_)
    throw MemoryBudgetError({"Arena", text_of("at most ", limit_, " bytes of activations"), text_of(top_ + bytes),
                             "raise --memory-budget, lower --token-budget, or use --trunk-state recompute"});
  std::byte* data = base_ + top_;
  top_ += bytes;
  high_water_ = std::max(high_water_, top_);
  touched_ = std::max(touched_, top_);
  ASAN_UNPOISON_MEMORY_REGION(data, bytes);
  return at::from_blob(data, sizes, at::TensorOptions().dtype(dtype));
}

void Arena::release_to(std::int64_t mark) {
  ESPALIER_INTERNAL(mark <= top_, "mark ", mark, ", top ", top_);
  ASAN_POISON_MEMORY_REGION(base_ + mark, top_ - mark);
  top_ = mark;
}

}  // namespace espalier
