// The ranks of a run as processes: they meet at a store, Gloo carries their collectives.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "espalier/parallel/launch.h"
#include "espalier/parallel/mesh.h"

namespace espalier {

class Processes {
 public:
  // Ranks start one after another: while they look for each other, so many seconds are waited in any case.
  static constexpr double kStart = 10;

  // Finds the rendezvous; rank 0 makes it if the launcher does not. `timeout`: seconds until a silent rank is
  // considered dead. Errors: CommunicationError.
  Processes(const Launch& launch, double timeout);
  ~Processes();

  // Connects every rank with those that share an axis with it. Called once. Errors: CommunicationError.
  const Mesh& connect(const Degrees& degrees);

  // The text that `make` returns on rank 0, sent to all before they connect. Errors: CommunicationError where rank 0
  // failed or says nothing.
  std::string told_by_rank_0(const std::string& what, const std::function<std::string()>& make);

  // Where something failed: true on the rank that calls it first, whose message is the one to be shown.
  bool is_first_to_fail();
  // "rank 2": those that did not call is_first_to_fail within half a second; empty: all did, or nobody knows.
  std::string silent_ranks();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace espalier
