// --products put into force.
#pragma once

#include "espalier/options/options.h"

namespace espalier {

// Chooses for the whole process whether sums have a defined order, by --products and --dtype (base/defined_sums.h).
// Called once the options are final, and again where they come from a file: a trace, or a run that is continued.
// OptionError for a wrong value of ESPALIER_PRODUCTS.
void choose_products(const Options& options);

}  // namespace espalier
