#include "cli/threads.h"

#include <ATen/Parallel.h>

namespace espalier::cli {

void use_threads(int threads) { at::set_num_threads(threads); }  // sets OpenMP's number, too

}  // namespace espalier::cli
