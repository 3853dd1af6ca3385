// Prints docs/options.md, generated from the option table: option_docs > docs/options.md
#include <cstdio>
#include <string>

#include "espalier/settings/option_help.h"

int main() {
  const std::string page = espalier::option_docs();
  return std::fwrite(page.data(), 1, page.size(), stdout) == page.size() && std::fflush(stdout) == 0 ? 0 : 1;
}
