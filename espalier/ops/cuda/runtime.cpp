// What launch.h asks of the CUDA runtime, and cuBLAS: the CUDA library's side.
#include "espalier/ops/cuda/runtime.h"

#include <cublas_v2.h>

#include <ATen/core/Tensor.h>

#include "espalier/base/error.h"
#include "espalier/ops/cuda/launch.h"
#include "espalier/ops/cuda/products.h"

namespace espalier::cuda {
namespace {

struct Work {
  cudaStream_t stream = nullptr;
  cublasHandle_t cublas = nullptr;
  void* cublas_workspace = nullptr;
};
Work& work() {
  static Work one;
  return one;
}

constexpr std::size_t kCublasWorkspace = std::size_t{32} << 20;  // what cuBLAS recommends for Hopper

void expect_cublas(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw InternalError({"cuBLAS", what, cublasGetStatusString(status), "please report this"});
}

cudaDataType_t type_of(at::ScalarType dtype) {
  return dtype == at::kDouble ? CUDA_R_64F : dtype == at::kFloat ? CUDA_R_32F : CUDA_R_16BF;
}

}  // namespace

void expect_success(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();
  if (status == cudaErrorMemoryAllocation)
    throw MemoryBudgetError({"GPU", "memory for " + std::string(what), cudaGetErrorString(status),
                             "lower --memory-budget, or end what else runs on this GPU (nvidia-smi lists it)"});
  throw InternalError({"GPU", what, cudaGetErrorString(status), "please report this"});
}

// Scratch comes from the driver's pool, which keeps what it has had: a step takes nothing anew.
void start(int index) {
  expect_success(cudaSetDevice(index), "cudaSetDevice");
  expect_success(cudaStreamCreateWithFlags(&work().stream, cudaStreamNonBlocking), "cudaStreamCreate");
  cudaMemPool_t pool = nullptr;
  expect_success(cudaDeviceGetDefaultMemPool(&pool, index), "cudaDeviceGetDefaultMemPool");
  std::uint64_t keep = ~std::uint64_t{0};
  expect_success(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep), "cudaMemPoolSetAttribute");
  expect_cublas(cublasCreate(&work().cublas), "cublasCreate");
  expect_cublas(cublasSetStream(work().cublas, work().stream), "cublasSetStream");
  // With a workspace of its own, on one stream, cuBLAS gives the same bits each time.
  expect_success(cudaMalloc(&work().cublas_workspace, kCublasWorkspace), "the workspace of cuBLAS");
  expect_cublas(cublasSetWorkspace(work().cublas, work().cublas_workspace, kCublasWorkspace), "cublasSetWorkspace");
  expect_cublas(cublasSetMathMode(
                    work().cublas,
                    static_cast<cublasMath_t>(CUBLAS_DEFAULT_MATH | CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION)),
                "cublasSetMathMode");
}

Stream stream() { return work().stream; }
void expect_launched(const char* what) { expect_success(cudaPeekAtLastError(), what); }

void* take_scratch(std::size_t bytes) {
  void* memory = nullptr;
  expect_success(cudaMallocAsync(&memory, bytes == 0 ? 1 : bytes, stream()), "scratch");
  return memory;
}
void give_back_scratch(void* memory) { cudaFreeAsync(memory, stream()); }

void fill_zero(void* memory, std::size_t bytes) {
  if (bytes > 0) expect_success(cudaMemsetAsync(memory, 0, bytes, stream()), "cudaMemset");
}
void copy_on_device(void* to, const void* from, std::size_t bytes) {
  if (bytes > 0) expect_success(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream()), "a copy");
}
void copy_to_host(void* host, const void* memory, std::size_t bytes) {
  if (bytes > 0)
    expect_success(cudaMemcpyAsync(host, memory, bytes, cudaMemcpyDeviceToHost, stream()), "a copy to the host");
  expect_success(cudaStreamSynchronize(stream()), "the work on the GPU");
}

// Without TF32: float32 products are float32 throughout.
void run_product(const ColumnProduct& p) {
  const bool wide = p.in == at::kDouble;
  const double one = 1, beta = p.adds ? 1 : 0;
  const float one_f = 1, beta_f = p.adds ? 1.0f : 0.0f;
  const auto operation = [](bool transpose) { return transpose ? CUBLAS_OP_T : CUBLAS_OP_N; };
  expect_cublas(
      cublasGemmEx_64(work().cublas, operation(p.transpose_a), operation(p.transpose_b), p.m, p.n, p.k,
                      wide ? static_cast<const void*>(&one) : &one_f, p.a, type_of(p.in), p.lda, p.b, type_of(p.in),
                      p.ldb, wide ? static_cast<const void*>(&beta) : &beta_f, p.c, type_of(p.out), p.ldc,
                      wide ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
      "a product");
}

}  // namespace espalier::cuda
