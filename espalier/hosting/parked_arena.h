// The content of an arena in a store, while others use its memory.
#pragma once

#include <filesystem>
#include <memory>
#include <vector>

#include "espalier/device/arena.h"
#include "espalier/saved/store.h"

namespace espalier {

class ParkedArena {
 public:
  // Moves everything that the arena holds to a store of its device (`folder`: as store_of). Its tensors may not be used
  // until come_back. Errors: WriteError, MemoryBudgetError; the arena is then as it was.
  ParkedArena(Arena& arena, const std::filesystem::path& folder);
  // Brings the content back to its addresses. Errors: InputError if the store lost it.
  void come_back();
  // Gives the arena its memory again without the content: for the end of a call.
  void drop();

 private:
  Arena& arena_;
  std::unique_ptr<Store> store_;
  std::vector<Arena::Range> ranges_;
  struct Piece {
    Arena::Range range;
    StoredChunk chunk;
  };
  std::vector<Piece> pieces_;
};

}  // namespace espalier
