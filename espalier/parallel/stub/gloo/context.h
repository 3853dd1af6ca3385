// Gloo's contexts as far as c10d's header names them, without bodies: a use beyond that is a link error.
#pragma once

#include <chrono>

namespace gloo {

class Context {
 public:
  void setTimeout(std::chrono::milliseconds);
};

}  // namespace gloo
