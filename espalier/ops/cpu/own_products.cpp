// Chooses the instruction set of a product and divides it among threads.
#include "espalier/ops/cpu/own_products.h"

#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <type_traits>

#include "espalier/base/defined_sums.h"
#include "espalier/base/instruction_set.h"

namespace espalier {

#define ESPALIER_OWN_PRODUCTS(set)                   \
  namespace set {                                    \
  template <class T, class Out>                      \
  own_products::Kernel<T, Out> own_product_kernel(); \
  }
ESPALIER_EACH_SET(ESPALIER_OWN_PRODUCTS)
ESPALIER_SET_OF_PAIRS(ESPALIER_OWN_PRODUCTS)
#undef ESPALIER_OWN_PRODUCTS

namespace own_products {
namespace {

// Below this many multiply-adds a second thread costs more than it saves.
constexpr std::int64_t kSharedWork = 1 << 20;

template <class T, class Out>
Kernel<T, Out> kernel() {
#define ESPALIER_IN_PAIRS(set)               \
  if constexpr (std::is_same_v<T, bfloat16>) \
    if (bfloat16_products() != Bfloat16Products::converted) return set::own_product_kernel<T, Out>();
  ESPALIER_SET_OF_PAIRS(ESPALIER_IN_PAIRS)  // a processor with tiles has these instructions too
#undef ESPALIER_IN_PAIRS
  return ESPALIER_FOR_SET(own_product_kernel<T, Out>)();
}

void* scratch_of_thread() {
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  static thread_local const std::unique_ptr<void, Free> memory(
      std::aligned_alloc(64, static_cast<std::size_t>(kOwnProductBytes)));
  if (!memory) throw std::bad_alloc();
  return memory.get();
}

}  // namespace

template <class T, class Out>
void multiply(const Product<T, Out>& p, int threads) {
  const Kernel<T, Out> k = kernel<T, Out>();
  const std::int64_t panels = (p.columns + k.panel - 1) / k.panel;
  if (threads == 1 || p.rows * p.columns * p.steps < kSharedWork)
    return k.part(p, {0, p.rows}, {0, p.columns}, scratch_of_thread());
#pragma omp parallel num_threads(threads)
  {
    const std::int64_t n = omp_get_num_threads(), i = omp_get_thread_num();
    const auto column = [&](std::int64_t at) { return std::min(at * panels / n * k.panel, p.columns); };
    const auto row = [&](std::int64_t at) { return at * p.rows / n; };
    const bool by_columns = panels >= 4 * n || p.rows < n;
    const Range rows = by_columns ? Range{0, p.rows} : Range{row(i), row(i + 1)};
    const Range columns = by_columns ? Range{column(i), column(i + 1)} : Range{0, p.columns};
    if (rows.begin < rows.end && columns.begin < columns.end) k.part(p, rows, columns, scratch_of_thread());
  }
}

template <class T>
std::int64_t panel_bytes(std::int64_t columns, std::int64_t steps) {
  return kernel<T, T>().panel_bytes(columns, steps);
}

template <class T>
void pack_panels(const Factor<T>& b, std::int64_t columns, std::int64_t steps, void* to) {
  kernel<T, T>().pack(b, columns, steps, to);
}

#define ESPALIER_PANELS_OF(T)                                       \
  template std::int64_t panel_bytes<T>(std::int64_t, std::int64_t); \
  template void pack_panels(const Factor<T>&, std::int64_t, std::int64_t, void*);
ESPALIER_PANELS_OF(float)
ESPALIER_PANELS_OF(double)
ESPALIER_PANELS_OF(bfloat16)
#undef ESPALIER_PANELS_OF

template void multiply(const Product<float, float>&, int);
template void multiply(const Product<double, double>&, int);
template void multiply(const Product<bfloat16, bfloat16>&, int);
template void multiply(const Product<bfloat16, float>&, int);

}  // namespace own_products
}  // namespace espalier
