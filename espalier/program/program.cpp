#include "espalier/program/program.h"

#include <algorithm>
#include <deque>
#include <utility>

#include "espalier/base/error.h"
#include "espalier/program/draft_item.h"
#include "espalier/program/row_shares.h"
#include "espalier/program/schedule.h"

namespace espalier {
namespace {

// Says which waves are in flight: the one place that does.
template <class Item>
class Writer {
 public:
  explicit Writer(std::int64_t in_flight) : most_(in_flight) {}

  void add(Event event, const Item* item, bool on_path = false, std::int64_t rows_behind = 0) {
    StepOf<Item> step{.on_path = on_path, .own = item, .rows_behind = rows_behind};
    if (event == Event::wave) {
      step.region = static_cast<std::int32_t>(waves_++ % most_);
      steps_.push_back(step);
      in_flight_.push_back(step);
      if (std::ssize(in_flight_) == most_) end_first_wave();
      return;
    }
    end_waves();
    step.kind = ItemKind::trunk;
    step.pass = event == Event::open ? Pass::forward : Pass::backward;
    steps_.push_back(step);
  }

  ProgramOf<Item> finish() {
    end_waves();
    add_up();
    return std::move(steps_);
  }

 private:
  void end_waves() {
    while (!in_flight_.empty()) end_first_wave();
  }
  void end_first_wave() {
    steps_.push_back(in_flight_.front());
    steps_.back().pass = Pass::backward;
    in_flight_.pop_front();
  }

  // Completes a trunk's steps by the steps below it.
  void add_up() {
    struct Open {
      std::size_t forward, last_below;  // numbers of steps
      std::int64_t reports = 0;
    };
    std::vector<Open> open;
    for (std::size_t at = 0; at < steps_.size(); ++at) {
      const StepOf<Item>& step = steps_[at];
      const bool own_trunk = step.kind == ItemKind::trunk && step.own != nullptr;
      if (own_trunk && step.pass == Pass::forward) {
        open.push_back({at, at});
        continue;
      }
      std::int64_t reports = step.pass == Pass::backward && (step.own != nullptr || step.on_path) ? 1 : 0;
      if (own_trunk) {
        const Open trunk = open.back();
        open.pop_back();
        steps_[trunk.forward].reports = trunk.reports;
        if (trunk.last_below != trunk.forward) steps_[trunk.last_below].last_below = true;
        reports += trunk.reports;
      }
      if (open.empty()) continue;
      open.back().reports += reports;
      if (own_trunk || (step.own != nullptr && step.pass == Pass::forward)) open.back().last_below = at;
    }
    ESPALIER_INTERNAL(open.empty(), "a trunk is not closed");
  }

  std::int64_t most_, waves_ = 0;
  ProgramOf<Item> steps_;
  std::deque<StepOf<Item>> in_flight_;  // forwards of waves whose backward stands nowhere yet, oldest first
};

// An event of a rank's own, and the rows of the plan up to the next one.
struct OwnEvent {
  Event event;
  const PlanItem* item;
  std::int64_t rows_behind;
};

std::vector<OwnEvent> own_events(const std::vector<PlanItem>& items, std::int64_t cp_rank) {
  std::vector<OwnEvent> out;
  std::int64_t rows = 0;
  run_schedule(items, [&](Event event, const PlanItem& item) {
    if (event != Event::close) rows += item.set.rows;
    if (runs_on(item, cp_rank)) out.push_back({event, &item, rows});
    if (!out.empty()) out.back().rows_behind = rows;
  });
  return out;
}

template <class Item>
ProgramOf<Item> program_of_all(std::span<const Item> items, std::int64_t in_flight) {
  Writer<Item> writer(in_flight);
  run_schedule(items, [&](Event event, const Item& item) { writer.add(event, &item); });
  return writer.finish();
}

}  // namespace

Program program_of(std::span<const PlanItem> items, std::int64_t in_flight) { return program_of_all(items, in_flight); }
ProgramOf<Draft> program_of(std::span<const Draft> items, std::int64_t in_flight) {
  return program_of_all(items, in_flight);
}

Program program_of(const std::vector<PlanItem>& items, const std::vector<JointEvent>& order, const Seat& seat) {
  const std::vector<OwnEvent> own = own_events(items, seat.cp_rank);
  const auto any_of_cp = [&](const JointEvent& joint) {  // where they divide the path all of them are in the order
    const auto first = joint.own.begin() + (static_cast<std::ptrdiff_t>(seat.member) - seat.cp_rank);
    return std::count(first, first + seat.cp, 1) > 0;
  };
  Writer<PlanItem> writer(seat.in_flight);
  auto next = own.begin();
  for (const JointEvent& joint : order) {
    const bool on_path = seat.path_sharded && any_of_cp(joint);
    if (joint.own[seat.member] == 0) {
      writer.add(joint.event, nullptr, on_path);
      continue;
    }
    ESPALIER_INTERNAL(next != own.end() && next->event == joint.event, "another order than the plan's");
    writer.add(joint.event, next->item, on_path, next->rows_behind);
    ++next;
  }
  ESPALIER_INTERNAL(next == own.end(), "an order that leaves events out");
  return writer.finish();
}

std::int64_t count_backwards(const Program& program) {
  return std::ranges::count(program, Pass::backward, &Step::pass);
}

}  // namespace espalier
