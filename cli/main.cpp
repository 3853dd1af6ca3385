// The program: signals first, then the verb (cli/program.h).

#include "cli/interrupt.h"
#include "cli/program.h"

int main(int argc, char** argv) {
  espalier::cli::install_interrupt_handlers();
  return espalier::cli::run_program({argv + (argc > 0 ? 1 : 0), argv + argc});
}
