#include "espalier/ops/cuda/collectives.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "espalier/base/error.h"
#include "espalier/metrics/timer.h"

namespace espalier::cuda {

const char* name_of(Collective::Kind kind) {
  using Kind = Collective::Kind;
  switch (kind) {
    case Kind::sum:
      return "sum over ranks";
    case Kind::maximum:
      return "maximum over ranks";
    case Kind::gather:
      return "gather";
    case Kind::scatter_sum:
      return "sum and scatter";
    case Kind::exchange:
      return "exchange";
    case Kind::broadcast:
      return "broadcast";
    case Kind::send:
      return "send";
    case Kind::receive:
      return "receive";
  }
  throw InternalError({"", "a collective", text_of(static_cast<int>(kind)), ""});
}

namespace {

std::vector<Communicator*>& communicators() {
  static thread_local std::vector<Communicator*> of_this_rank;
  return of_this_rank;
}

}  // namespace

Communicator::Communicator() { communicators().push_back(this); }
Communicator::~Communicator() { std::erase(communicators(), this); }

void Unfinished::add(Collective::Kind kind, Event begin, Event end, double timeout) {
  all_.push_back({kind, begin, end, timeout});
}

bool Unfinished::has_sends_alone() const {
  return std::ranges::all_of(all_, [](const Entry& entry) { return entry.kind == Collective::Kind::send; });
}

void Unfinished::check() {
  const double now = Timer::steady_seconds();
  std::erase_if(all_, [](const Entry& entry) {
    if (!happened(entry.end)) return false;
    forget(entry.begin);
    forget(entry.end);
    return true;
  });
  for (Entry& entry : all_) {
    if (entry.began < 0 && happened(entry.begin)) entry.began = now;
    if (entry.began < 0 || now - entry.began <= entry.timeout) continue;
    const CommunicationError error(
        {name_of(entry.kind), text_of("an answer of every rank within ", entry.timeout, " seconds (--comm-timeout)"),
         "a collective that started and did not end", ""});
    all_.clear();
    for (Communicator* const communicator : communicators()) communicator->give_up();
    throw error;
  }
}

Unfinished& unfinished() {
  static thread_local Unfinished of_this_rank;
  return of_this_rank;
}

void pause_after(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(std::clamp(seconds / 8, 20e-6, 1e-3)));
}

namespace {

// Looks whether collectives have ended until none is left or `done` holds.
template <class Done>
void look_until(const Done& done) {
  constexpr double kSpin = 100e-6;  // seconds
  const double begin = Timer::steady_seconds();
  while (!unfinished().empty() && !done()) {
    unfinished().check();
    if (const double waited = Timer::steady_seconds() - begin; waited < kSpin)
      std::this_thread::yield();
    else
      pause_after(waited);
  }
}

}  // namespace

void wait_for_collectives() {
  look_until([] { return false; });
}

void wait_for_all_but_sends() {
  look_until([] { return unfinished().has_sends_alone(); });
}

// Without collectives nothing can hang for want of another rank, and the driver waits best.
void wait_until(Event event) {
  look_until([event] { return happened(event); });
  synchronize(event);
}

}  // namespace espalier::cuda
