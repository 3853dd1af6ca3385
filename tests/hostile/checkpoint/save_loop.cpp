// checkpoint_save_loop SOURCE TARGET FIRST: saves versions FIRST, FIRST + 1, ... of a small model and its run state to
// TARGET until it is killed. Every weight, master and moment of version k equals k.
#include <cstdlib>
#include <exception>

#include "tests/hostile/checkpoint/save_version.h"

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  try {
    for (std::int64_t version = std::atoll(argv[3]);; ++version)
      espalier::test::save_version(argv[1], argv[2], version);
  } catch (const std::exception&) {
    return 3;
  }
}
