#include "espalier/saved/store.h"

#include <sys/mman.h>

#include <algorithm>

#include "espalier/base/error.h"
#include "espalier/base/units.h"
#include "espalier/machine/memory.h"
#include "espalier/saved/spill_file.h"

namespace espalier {

HostStore::~HostStore() {
  if (memory_ != nullptr) munmap(memory_, static_cast<std::size_t>(bytes_));
}

void HostStore::reserve(std::int64_t bytes) {
  bytes = aligned(bytes);
  if (bytes <= bytes_) return;
  ESPALIER_INTERNAL_EQ(bytes_, 0);
  void* const memory =
      mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED)
    throw MemoryBudgetError({"--trunk-state offload", text_of(format_bytes(bytes), " of the host's memory"),
                             "a failed allocation", "use --trunk-state recompute"});
  memory_ = static_cast<std::byte*>(memory);
  bytes_ = bytes;
}

void HostStore::write(StoredChunk& chunk, const std::byte* memory) {
  ESPALIER_INTERNAL(chunk.offset + chunk.bytes <= bytes_, chunk.offset, " + ", chunk.bytes, " of ", bytes_);
  std::copy_n(memory, chunk.bytes, memory_ + chunk.offset);
}

void HostStore::read(const StoredChunk& chunk, std::byte* memory) {
  std::copy_n(memory_ + chunk.offset, chunk.bytes, memory);
}

std::unique_ptr<Store> store_of(const Device& device, const std::filesystem::path& folder) {
  if (device.in_host_memory()) return std::make_unique<SpillFile>(folder);
  return std::make_unique<HostStore>();
}

std::int64_t room_to_store(const Device& device, const std::filesystem::path& folder) {
  return device.in_host_memory() ? room_to_spill(folder)
                                 : static_cast<std::int64_t>(0.9 * static_cast<double>(available_bytes()));
}

}  // namespace espalier
