#include "espalier/device/buffers.h"

namespace espalier {

void BufferList::expect_stack() const {
  const auto all = buffers();
  for (std::size_t i = 0; i < all.size(); ++i)
    for (std::size_t j = i + 1; j < all.size(); ++j) {
      const Buffer &below = all[i], &above = all[j];
      const bool apart = above.first > below.last || above.last < below.first;
      ESPALIER_INTERNAL(apart || (below.first <= above.first && above.last <= below.last), below.name, " and ",
                        above.name, " do not end in the order of a stack");
    }
}

}  // namespace espalier
