// Ranks that run other rows than each other meet in every layer where experts are spread over them or weights divided:
// the next event of their common order (plan/joint_order.h), and whether this rank has rows of its own for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "espalier/parallel/mesh.h"
#include "espalier/plan/joint_order.h"

namespace espalier {

class InStep {
 public:
  // Every rank of a stage makes one for the same run. There is no order where all ranks of ep have the same rows.
  InStep(const Mesh& mesh, const StepPlan& plan);

  // Of all events those with a backward; none where there is no order.
  std::int64_t backwards() const;
  // Takes the next event if it is one that this rank has no rows for.
  std::optional<Event> take_of_others();
  // Takes the next one, which is this rank's own.
  void take_own(Event event);

 private:
  struct Turn {
    Event event;
    bool own;
  };

  std::vector<Turn> order_;  // empty: none
  std::size_t next_ = 0;
};

}  // namespace espalier
