#include "espalier/hosting/parked_arena.h"

#include <algorithm>

namespace espalier {
namespace {

constexpr std::int64_t kPieceBytes = std::int64_t{8} << 20;

// Host memory that the device copies fast.
class CopyRoom {
 public:
  explicit CopyRoom(Device& device) : device_(device), memory_(device.take_host_memory(kPieceBytes)) {}
  ~CopyRoom() { device_.give_back_host_memory(memory_, kPieceBytes); }
  CopyRoom(const CopyRoom&) = delete;
  CopyRoom& operator=(const CopyRoom&) = delete;

  std::byte* memory() const { return memory_; }

 private:
  Device& device_;
  std::byte* memory_;
};

}  // namespace

ParkedArena::ParkedArena(Arena& arena, const std::filesystem::path& folder)
    : arena_(arena), store_(store_of(arena.device(), folder)), ranges_(arena.awake()) {
  std::int64_t bytes = 0;
  for (const Arena::Range& range : ranges_)
    for (std::int64_t begin = range.begin; begin < range.end; begin += kPieceBytes) {
      const Arena::Range piece{begin, std::min(begin + kPieceBytes, range.end)};
      pieces_.push_back({piece, {bytes, piece.bytes()}});
      bytes += Store::aligned(piece.bytes());
    }
  store_->reserve(bytes);
  const CopyRoom room(arena.device());
  for (Piece& piece : pieces_) {
    arena_.copy_out(piece.range, room.memory());
    store_->write(piece.chunk, room.memory());
  }
  for (const Arena::Range& range : ranges_) arena_.sleep(range);
  arena_.trim();
}

void ParkedArena::come_back() {
  drop();
  const CopyRoom room(arena_.device());
  for (const Piece& piece : pieces_) {
    store_->read(piece.chunk, room.memory());
    arena_.copy_in(room.memory(), piece.range);
  }
}

void ParkedArena::drop() {
  for (const Arena::Range& range : ranges_) arena_.wake(range);
  ranges_.clear();
}

}  // namespace espalier
