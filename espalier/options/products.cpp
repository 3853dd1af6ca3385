#include "espalier/options/products.h"

#include <optional>

#include "espalier/base/defined_sums.h"

namespace espalier {

void choose_products(const Options& options) {
  std::optional<bool> own;
  if (options.products != ProductsOf::automatic) own = options.products == ProductsOf::own;
  choose_defined_sums(own, options.dtype);
}

}  // namespace espalier
