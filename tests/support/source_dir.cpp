#include "tests/support/source_dir.h"

namespace espalier::testing {

std::string source_dir() { return ESPALIER_SOURCE_DIR; }

}  // namespace espalier::testing
