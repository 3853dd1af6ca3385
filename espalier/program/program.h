// The rank program: the steps that a rank runs in a pass. Executor, memory walk and byte forecast read it.
//
// Stage s of S stages of pp, counted from 0, has up to S - s waves in flight: it runs that many forwards before the
// first backward, then one forward and one backward in turn. Waves end in the order they began, and each has its own
// region of memory. All waves have ended before a trunk's forward and before its backward. The last stage, a single
// stage, and a pass without gradients end every wave before the next step. If ranks with different rows meet, waves of
// other ranks count as in flight, so that all stages keep one order.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "espalier/parallel/degrees.h"
#include "espalier/program/joint_order.h"
#include "espalier/program/step_plan.h"

namespace espalier {

struct Draft;

enum class Pass : std::uint8_t { forward, backward };

// Without gradients a backward ends its item and computes nothing.
template <class Item>
struct StepOf {
  Pass pass = Pass::forward;
  ItemKind kind = ItemKind::wave;
  bool on_path = false;          // run by ranks of its cp group, with the path sharded over cp
  bool last_below = false;       // forward of a wave or backward of a trunk: the rank's last item below its trunk
  std::int32_t region = 0;       // memory region of a wave, from its forward to its backward
  const Item* own = nullptr;     // null: other ranks run the item; this rank joins without rows
  std::int64_t reports = 0;      // for a trunk's forward: backwards below, at any depth, that add to its gradients
  std::int64_t rows_behind = 0;  // for an own item: rows of the plan up to the rank's next item

  bool operator==(const StepOf&) const = default;
};

template <class Item>
using ProgramOf = std::vector<StepOf<Item>>;
using Step = StepOf<PlanItem>;
using Program = ProgramOf<PlanItem>;

// The rank program of all items, of every rank of cp, in the order of the schedule.
Program program_of(std::span<const PlanItem> items, std::int64_t in_flight);
ProgramOf<Draft> program_of(std::span<const Draft> items, std::int64_t in_flight);

// A rank's place in the joint order: `member` is its number among the ranks that share the order.
struct Seat {
  std::size_t member = 0;
  std::int64_t cp_rank = 0, cp = 1;
  std::int64_t in_flight = 1;
  bool path_sharded = false;  // sharded over its cp group
};
// Steps with the same number are the same event on every rank of the order at the same stage of pp.
Program program_of(const std::vector<PlanItem>& items, const std::vector<JointEvent>& order, const Seat& seat);

std::int64_t count_backwards(const Program& program);

}  // namespace espalier
