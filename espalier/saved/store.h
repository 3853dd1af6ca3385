// The store for offloaded data: an unnamed file for a CPU, host memory for a device with its own memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>

#include "espalier/device/device.h"

namespace espalier {

// One run of bytes in a store. `offset` is a multiple of Store::kAlignment.
struct StoredChunk {
  std::int64_t offset = 0, bytes = 0;
  std::uint32_t checksum = 0;  // CRC-32 of the bytes, set by write if the store may corrupt data
};

// reserve, write and read run on one thread, that of the SpillQueue, with SIGXFSZ blocked.
class Store {
 public:
  // Chunks begin at multiples of it. The memory that a call reads or writes begins at a multiple of it, too, and holds
  // aligned(chunk.bytes) bytes.
  static constexpr std::int64_t kAlignment = 4096;
  static constexpr std::int64_t aligned(std::int64_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  virtual ~Store() = default;

  // Reserves this many bytes in all, before anything is written. Errors: WriteError, MemoryBudgetError.
  virtual void reserve(std::int64_t bytes) = 0;
  // Errors: WriteError.
  virtual void write(StoredChunk& chunk, const std::byte* memory) = 0;
  // Errors: InputError if the data cannot be read or is corrupted.
  virtual void read(const StoredChunk& chunk, std::byte* memory) = 0;
};

// A store in host memory. It cannot grow after the first reserve.
class HostStore final : public Store {
 public:
  HostStore() = default;
  ~HostStore() override;
  HostStore(const HostStore&) = delete;
  HostStore& operator=(const HostStore&) = delete;

  void reserve(std::int64_t bytes) override;
  void write(StoredChunk& chunk, const std::byte* memory) override;
  void read(const StoredChunk& chunk, std::byte* memory) override;

 private:
  std::byte* memory_ = nullptr;
  std::int64_t bytes_ = 0;
};

// The store of a device. `folder`: the place of the spill file of a CPU (empty: the system's folder for temporary
// files).
std::unique_ptr<Store> store_of(const Device& device, const std::filesystem::path& folder);

// Bytes that may be offloaded there without being requested: 90 % of the free space, or of the free host memory.
std::int64_t room_to_store(const Device& device, const std::filesystem::path& folder);

}  // namespace espalier
