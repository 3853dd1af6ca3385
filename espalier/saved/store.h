// Where what is stored away waits: a file without a name for what the host computes, the host's memory for a device
// that has memory of its own.
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
  std::uint32_t checksum = 0;  // CRC-32 of the bytes, set by write where the store may lose some
};

// The three calls run on one thread at a time, the store's own, in which SIGXFSZ is blocked.
class Store {
 public:
  // Chunks begin at multiples of it, and memory that they are written from or read to is aligned to it and as long.
  static constexpr std::int64_t kAlignment = 4096;
  static constexpr std::int64_t aligned(std::int64_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  virtual ~Store() = default;

  // Space for so many bytes, taken now, before anything is written. Errors: WriteError, MemoryBudgetError.
  virtual void reserve(std::int64_t bytes) = 0;
  // Errors: WriteError.
  virtual void write(StoredChunk& chunk, const std::byte* memory) = 0;
  // Errors: InputError where the bytes are not those that were written.
  virtual void read(const StoredChunk& chunk, std::byte* memory) = 0;
};

// In the host's memory.
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

// The store of a device; `folder`: of the file, where it is one (empty: the system's for temporary files).
std::unique_ptr<Store> store_of(const Device& device, const std::filesystem::path& folder);

// Bytes that may be stored away there where nobody asked for it: what is free, less a margin.
std::int64_t room_to_store(const Device& device, const std::filesystem::path& folder);

}  // namespace espalier
