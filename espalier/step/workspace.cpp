#include "espalier/step/workspace.h"

#include <algorithm>

namespace espalier {

Holder::Holder(Workspace& workspace) : workspace_(workspace) { workspace_.holders_.push_back(this); }
Holder::~Holder() { std::erase(workspace_.holders_, this); }

std::int64_t Workspace::held_bytes() const {
  std::int64_t sum = 0;
  for (const Holder* holder : holders_) sum += holder->held_bytes();
  return sum;
}

std::int64_t Workspace::held_beside(const Holder& holder) const { return held_bytes() - holder.held_bytes(); }

std::int64_t Workspace::held_beside(std::int64_t own_bytes) const {
  return std::max<std::int64_t>(0, held_bytes() - own_bytes);
}

}  // namespace espalier
