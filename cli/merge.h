// espalier merge ADAPTER.
#pragma once

#include "cli/verbs.h"

namespace espalier::cli {

int run_merge(Context& context);

}  // namespace espalier::cli
