// The CUDA runtime and cuBLAS as operations know them, on the emulation: memory is the host's, work runs at once.
//
// A program that links this file runs on the emulated kernels where ESPALIER_TEST_DEVICE is "emulated": late and in
// protected memory, as on the guarded device, whose operations they then are.
#include <ATen/ATen.h>

#include <cstdlib>
#include <cstring>
#include <string_view>

#include "espalier/device/scalar_type.h"
#include "espalier/ops/cuda/launch.h"
#include "espalier/ops/cuda/operations.h"
#include "espalier/ops/cuda/products.h"
#include "tests/device/guarded_device.h"

namespace espalier::cuda {

Stream stream() { return nullptr; }
void expect_launched(const char*) {}

// Of exactly so many bytes, each NaN.
void* take_scratch(std::size_t bytes) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 256, bytes) != 0) throw std::bad_alloc();
  return std::memset(memory, 0xff, bytes);
}
void give_back_scratch(void* memory) { std::free(memory); }

void fill_zero(void* memory, std::size_t bytes) { std::memset(memory, 0, bytes); }
void copy_on_device(void* to, const void* from, std::size_t bytes) { std::memcpy(to, from, bytes); }
void copy_to_host(void* host, const void* memory, std::size_t bytes) { std::memcpy(host, memory, bytes); }

// The columns of a matrix [rows, columns] behind each other.
static at::Tensor columns_of(const void* data, std::int64_t rows, std::int64_t columns, std::int64_t ld,
                             at::ScalarType dtype) {
  return at::from_blob(const_cast<void*>(data), {rows, columns}, {1, ld}, at::TensorOptions().dtype(dtype));
}

void run_product(const ColumnProduct& p) {
  const at::ScalarType sums = accumulator_type(p.in);
  const auto factor = [&](const void* data, std::int64_t rows, std::int64_t columns, std::int64_t ld, bool transpose) {
    const at::Tensor x =
        transpose ? columns_of(data, columns, rows, ld, p.in).t() : columns_of(data, rows, columns, ld, p.in);
    return x.to(sums);
  };
  at::Tensor sum = at::mm(factor(p.a, p.m, p.k, p.lda, p.transpose_a), factor(p.b, p.k, p.n, p.ldb, p.transpose_b));
  const at::Tensor c = columns_of(p.c, p.m, p.n, p.ldc, p.out);
  if (p.adds) sum += c.to(sums);
  c.copy_(sum);
}

namespace {

struct BindByEnvironment {
  BindByEnvironment() {
    const char* named = std::getenv("ESPALIER_TEST_DEVICE");
    if (named == nullptr || std::string_view(named) != "emulated") return;
    testing::guarded_device().run(operations());
    bind_device(testing::guarded_device());
  }
} const bind_by_environment;

}  // namespace
}  // namespace espalier::cuda
