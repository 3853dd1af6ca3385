#include "tests/unit/allocations/heap_count.h"

#include <errno.h>
#include <stddef.h>

#include <algorithm>
#include <atomic>

namespace {

std::atomic<bool> counting{false};
std::atomic<std::int64_t> calls{0}, bytes{0}, large_calls{0};
std::atomic<std::int64_t> large[espalier::testing::kMostLarge];

[[maybe_unused]] void count(size_t size) {
  if (!counting.load(std::memory_order_relaxed)) return;
  calls.fetch_add(1, std::memory_order_relaxed);
  bytes.fetch_add(static_cast<std::int64_t>(size), std::memory_order_relaxed);
  if (static_cast<std::int64_t>(size) < espalier::testing::kLargeBytes) return;
  const std::int64_t at = large_calls.fetch_add(1, std::memory_order_relaxed);
  if (at < espalier::testing::kMostLarge) large[at].store(static_cast<std::int64_t>(size), std::memory_order_relaxed);
}

}  // namespace

#if defined(__SANITIZE_ADDRESS__)
#define ESPALIER_COUNTS_HEAP 0
#else
#define ESPALIER_COUNTS_HEAP 1
// The C library's own names of its allocator (glibc).
extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);

void* malloc(size_t size) {
  count(size);
  return __libc_malloc(size);
}
void* calloc(size_t number, size_t size) {
  count(number * size);
  return __libc_calloc(number, size);
}
void* realloc(void* old, size_t size) {
  count(size);
  return __libc_realloc(old, size);
}
void* memalign(size_t alignment, size_t size) {
  count(size);
  return __libc_memalign(alignment, size);
}
void* aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }
int posix_memalign(void** out, size_t alignment, size_t size) {
  *out = memalign(alignment, size);
  return *out == nullptr ? ENOMEM : 0;
}
}
#endif

namespace espalier::testing {

bool heap_is_counted() { return ESPALIER_COUNTS_HEAP != 0; }

void start_counting() {
  calls = bytes = large_calls = 0;
  counting = true;
}

HeapCount stop_counting() {
  counting = false;
  HeapCount out{calls, bytes, {}};
  for (std::int64_t i = 0; i < std::min<std::int64_t>(large_calls, kMostLarge); ++i) out.large.push_back(large[i]);
  return out;
}

}  // namespace espalier::testing
