// The ranks of a run as processes: they find each other through a store, and Gloo runs their collectives.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "espalier/parallel/launch.h"
#include "espalier/parallel/mesh.h"

namespace espalier {

class Processes {
 public:
  // Ranks do not start at the same moment. At the start they wait for each other at least this many seconds.
  static constexpr double kStart = 10;

  // Finds the rendezvous; rank 0 makes it if the launcher does not. `timeout`: seconds until a silent rank is
  // considered dead. Errors: CommunicationError.
  Processes(const Launch& launch, double timeout);
  ~Processes();

  // Connects every rank with those that share an axis with it. Called once. Errors: CommunicationError.
  const Mesh& connect(const Degrees& degrees);

  // The text that `make` returns on rank 0, sent to all ranks before they connect. Errors: on rank 0 as `make`;
  // on other ranks CommunicationError if rank 0 failed or is silent.
  std::string told_by_rank_0(const std::string& what, const std::function<std::string()>& make);

  // After a failure: true on the first rank that calls it, whose message is shown, and on ranks that cannot reach the
  // rendezvous. Ends this rank's connections, so that ranks that wait for it fail now; the mesh is gone then.
  bool is_first_to_fail();
  // "rank 2": the ranks that did not call is_first_to_fail within half a second; empty: none, or unknown.
  std::string silent_ranks();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace espalier
