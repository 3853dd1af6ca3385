// Where the sources lie, for tests that read files beside them. A function and not a macro, so that the path stands in
// one object: a compiler cache then serves every checkout with all others.
#pragma once

#include <string>

namespace espalier::testing {

// Without a slash at its end.
std::string source_dir();

}  // namespace espalier::testing
