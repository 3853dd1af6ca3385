// Ranks as threads of one process, so that what several ranks do can be tested in milliseconds. Sums are in rank order.
#pragma once

#include <functional>

#include "espalier/parallel/mesh.h"

namespace espalier {

struct InProcessOptions {
  double timeout = 60;  // seconds until a rank that others wait for is considered dead
  int threads = 1;      // of one rank's own parallel work
};

// Runs body(mesh) once for every rank, each in a thread of its own, and returns when all have ended. An exception in
// one rank ends all: the others get a CommunicationError in the collective they are in or call next; the first one is
// thrown here.
void run_ranks(const Degrees& degrees, const std::function<void(const Mesh& mesh)>& body,
               const InProcessOptions& options = {});

}  // namespace espalier
