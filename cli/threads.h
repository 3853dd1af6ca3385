// The number of threads that everything computes with.
#pragma once

namespace espalier::cli {

// For OpenMP and for ATen, which would otherwise choose a number of its own at its first parallel call.
void use_threads(int threads);

}  // namespace espalier::cli
