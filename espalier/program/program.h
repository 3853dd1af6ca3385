// The order of a pass as a list: what a rank runs, step by step. Executor, memory walk and byte forecast read it.
//
// Stage s of S stages of pp, counted from 0, has up to S - s waves in flight: it runs the forward of so many before
// the backward of the first, then one forward and one backward in turn. Waves end in the order they began, so each has
// a region of memory to itself. Before a trunk's forward and its backward all waves have ended. The last stage, the
// only one, or one without gradients ends every wave before the next step. Where ranks meet that have other rows than
// each other, waves of others count among those in flight, so that all stages keep one order.
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
  bool on_path = false;          // ranks of its cp run it, and divide the path
  bool last_below = false;       // forward of a wave or backward of a trunk: the rank's last of the trunk around it
  std::int32_t region = 0;       // of a wave, from its forward to its backward
  const Item* own = nullptr;     // null: other ranks run it; this one joins without rows
  std::int64_t reports = 0;      // of a trunk's forward: backwards below, at any depth, that add to its gradients
  std::int64_t rows_behind = 0;  // of an own item: rows of the plan up to the rank's next one

  bool operator==(const StepOf&) const = default;
};

template <class Item>
using ProgramOf = std::vector<StepOf<Item>>;
using Step = StepOf<PlanItem>;
using Program = ProgramOf<PlanItem>;

// All items, those of every rank of cp, in the order of the schedule.
Program program_of(std::span<const PlanItem> items, std::int64_t in_flight);
ProgramOf<Draft> program_of(std::span<const Draft> items, std::int64_t in_flight);

// A rank that goes through `order` with its neighbours: `member` is its number among them.
struct Seat {
  std::size_t member = 0;
  std::int64_t cp_rank = 0, cp = 1;
  std::int64_t in_flight = 1;
  bool path_divided = false;  // by its ranks of cp
};
// Steps with the same number are the same event on every rank of the order that is at the same stage of pp.
Program program_of(const std::vector<PlanItem>& items, const std::vector<JointEvent>& order, const Seat& seat);

std::int64_t count_backwards(const Program& program);

// "A B0 b0 C": a trunk's forward, a wave's forward and backward with its region, a trunk's backward; (..) joined.
std::string text_of_program(const Program& program);

}  // namespace espalier
