// Work around a stop of a pass (program/stops.h) besides its arithmetic: gathering weights, summing
// gradients, fetching a layer of the path or of a trunk, links between stages of pp, experts of other
// ranks.
#pragma once

#include <initializer_list>
#include <span>

#include "espalier/program/stops.h"

namespace espalier {

class Guest {
 public:
  virtual ~Guest() = default;

  // The stop comes next: slow work may begin.
  virtual void ahead(const Stop&) {}
  // Before the work at the stop, and after it.
  virtual void enter(const Stop&) {}
  virtual void leave(const Stop&) {}
};

// Goes through the stops. At each stop every guest enters, in the order of the list, and is told the next stop; then
// `run(stop)` works, and every guest leaves. Null guests are skipped. A rank that joins others without rows walks with
// guests only, so that its collectives match the other ranks' collectives.
template <class Run>
void walk(std::span<const Stop> stops, std::initializer_list<Guest*> guests, Run&& run) {
  const auto each = [&](auto&& act) {
    for (Guest* guest : guests)
      if (guest != nullptr) act(*guest);
  };
  if (!stops.empty()) each([&](Guest& guest) { guest.ahead(stops.front()); });
  for (std::size_t i = 0; i < stops.size(); ++i) {
    each([&](Guest& guest) {
      guest.enter(stops[i]);
      if (i + 1 < stops.size()) guest.ahead(stops[i + 1]);
    });
    run(stops[i]);
    each([&](Guest& guest) { guest.leave(stops[i]); });
  }
}
inline void walk(std::span<const Stop> stops, std::initializer_list<Guest*> guests) {
  walk(stops, guests, [](const Stop&) {});
}

}  // namespace espalier
