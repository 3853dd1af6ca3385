// The schedule of every plan (dense, packed, phased or a tree of trunks) is this recursion (docs/architecture.md). It
// defines the order of events. program/program.h turns it into a list, which all other code reads.
#pragma once

#include "espalier/program/step_plan.h"

namespace espalier {

// Events of a plan's items: a trunk's forward, a wave, a trunk's backward.
enum class Event : char { open = 'A', wave = 'B', close = 'C' };

// Calls visit(event, item) for the items and for everything below them, in order. Items: of PlanItem or Draft.
template <class Items, class Visit>
void run_schedule(const Items& items, Visit&& visit) {
  for (const auto& item : items) {
    if (item.kind == ItemKind::wave) {
      visit(Event::wave, item);  // phase B: forward, objective, backward
      continue;
    }
    visit(Event::open, item);  // phase A: forward; keys and values can be read from now on
    run_schedule(item.below, visit);
    visit(Event::close, item);  // phase C: backward, after everything below
  }
}

}  // namespace espalier
