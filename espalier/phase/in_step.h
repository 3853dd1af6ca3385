// Ranks that run other rows than each other meet in every layer where experts are spread over them, or weights or the
// path divided: the next event of their common order (plan/joint_order.h), and whether this rank has rows of its own
// for it.
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
  struct Turn {
    Event event;
    bool own;
    bool on_path;  // ranks of its cp run it, and divide the path
  };

  // Every rank of a stage makes one for the same run. There is no order where nobody has a reason to meet.
  InStep(const Mesh& mesh, const StepPlan& plan);

  // Of all events those with a backward; none where there is no order.
  std::int64_t backwards() const;
  // Takes the next event if it is one that this rank has no rows for.
  std::optional<Turn> take_of_others();
  // Takes the next one, which is this rank's own.
  void take_own(Event event);
  // The trunk that was opened last: events below it, at any depth, that this rank joins on the path.
  std::int64_t joined_below() const;

 private:
  std::vector<Turn> order_;  // empty: none
  std::size_t next_ = 0;
};

}  // namespace espalier
