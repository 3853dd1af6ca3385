// The CUDA library's side of launch.h and runtime.h: calls of the CUDA runtime and driver, and of cuBLAS.
#include "espalier/ops/cuda/runtime.h"

#include <cublas_v2.h>
#include <cuda.h>

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/ops/cuda/collectives.h"
#include "espalier/ops/cuda/launch.h"
#include "espalier/ops/cuda/products.h"
#include "espalier/ops/cuda/start.h"

namespace espalier::cuda {
namespace {

struct Work {
  int index = 0, capability = 0, most_shared_bytes = 0, connections = 8;  // as CUDA's default
  std::int64_t free_at_start = 0;
  std::vector<cudaStream_t> streams;  // by Queue
  std::vector<cudaEvent_t> events;
  std::vector<Event> free_events;
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

#define ESPALIER_DRIVER(name, ...)                                                  \
  do {                                                                              \
    static auto* const entry = driver_function<decltype(name)>(#name);              \
    const CUresult result = entry(__VA_ARGS__);                                     \
    expect_success(result == CUDA_SUCCESS               ? cudaSuccess               \
                   : result == CUDA_ERROR_OUT_OF_MEMORY ? cudaErrorMemoryAllocation \
                                                        : cudaErrorUnknown,         \
                   #name);                                                          \
  } while (false)

cudaEvent_t event_of(Event event) { return work().events.at(static_cast<std::size_t>(event)); }

}  // namespace

int gpu_index() { return work().index; }
int capability() { return work().capability; }
void* driver_entry(const char* name) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found{};
  expect_success(cudaGetDriverEntryPointByVersion(name, &entry, 12000, cudaEnableDefault, &found), name);
  ESPALIER_INTERNAL(found == cudaDriverEntryPointSuccess, name);
  return entry;
}
cudaStream_t stream_of(Queue queue) { return work().streams.at(static_cast<std::size_t>(queue)); }

void expect_success(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();
  if (status == cudaErrorMemoryAllocation)
    throw MemoryBudgetError({"GPU", "memory for " + std::string(what), cudaGetErrorString(status),
                             "lower --memory-budget, or end other programs on this GPU (nvidia-smi lists them)"});
  throw InternalError({"GPU", what, cudaGetErrorString(status), "please report this"});
}

// Scratch comes from the driver's pool, which keeps what it has had: a step takes nothing anew.
void start(int index, int capability) {
  work().index = index, work().capability = capability;
  expect_success(cudaSetDevice(index), "cudaSetDevice");
  expect_success(cudaDeviceGetAttribute(&work().most_shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, index),
                 "the shared memory of a block");
  if (const char* const given = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS"))
    work().connections = std::clamp(std::atoi(given), 1, kMostConnections);
  make_queue();
  make_queue();
  cudaMemPool_t pool = nullptr;
  expect_success(cudaDeviceGetDefaultMemPool(&pool, index), "cudaDeviceGetDefaultMemPool");
  std::uint64_t keep = ~std::uint64_t{0};
  expect_success(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep), "cudaMemPoolSetAttribute");
  expect_cublas(cublasCreate(&work().cublas), "cublasCreate");
  expect_cublas(cublasSetStream(work().cublas, stream()), "cublasSetStream");
  // With a workspace of its own, on one stream, cuBLAS gives the same bits each time.
  expect_success(cudaMalloc(&work().cublas_workspace, kCublasWorkspace), "the workspace of cuBLAS");
  expect_cublas(cublasSetWorkspace(work().cublas, work().cublas_workspace, kCublasWorkspace), "cublasSetWorkspace");
  expect_cublas(cublasSetMathMode(
                    work().cublas,
                    static_cast<cublasMath_t>(CUBLAS_DEFAULT_MATH | CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION)),
                "cublasSetMathMode");
  work().free_at_start = free_memory();
}

int connections() { return work().connections; }
Queue make_queue() {
  expect_success(cudaStreamCreateWithFlags(&work().streams.emplace_back(), cudaStreamNonBlocking), "cudaStreamCreate");
  return static_cast<Queue>(work().streams.size() - 1);
}
Event record(Queue queue) {
  std::vector<cudaEvent_t>& events = work().events;
  std::vector<Event>& free = work().free_events;
  if (free.empty()) {
    free.push_back(static_cast<Event>(events.size()));
    expect_success(cudaEventCreate(&events.emplace_back()), "cudaEventCreate");
  }
  const Event event = free.back();
  free.pop_back();
  expect_success(cudaEventRecord(event_of(event), stream_of(queue)), "cudaEventRecord");
  return event;
}
void wait(Queue queue, Event event) {
  expect_success(cudaStreamWaitEvent(stream_of(queue), event_of(event), 0), "cudaStreamWaitEvent");
}
void synchronize(Event event) { expect_success(cudaEventSynchronize(event_of(event)), "the work on the GPU"); }
bool happened(Event event) {
  const cudaError_t status = cudaEventQuery(event_of(event));
  if (status != cudaErrorNotReady) expect_success(status, "the work on the GPU");
  return status == cudaSuccess;
}
void forget(Event event) { work().free_events.push_back(event); }
double seconds_between(Event begin, Event end) {
  float milliseconds = 0;
  expect_success(cudaEventElapsedTime(&milliseconds, event_of(begin), event_of(end)), "cudaEventElapsedTime");
  return 1e-3 * static_cast<double>(milliseconds);
}

void copy(Queue queue, void* to, const void* from, std::size_t bytes) {
  if (bytes > 0) expect_success(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_of(queue)), "a copy");
}
void copy_rows(Queue queue, const CopiedRows& c) {
  if (c.rows == 1) return copy(queue, c.to, c.from, c.width);
  expect_success(
      cudaMemcpy2DAsync(c.to, c.to_stride, c.from, c.from_stride, c.width, c.rows, cudaMemcpyDefault, stream_of(queue)),
      "a copy of rows");
}

void* take_pinned(std::size_t bytes) {
  void* memory = nullptr;
  expect_success(cudaHostAlloc(&memory, bytes, cudaHostAllocDefault), "pinned memory of the host");
  return memory;
}
void give_back_pinned(void* memory) { cudaFreeHost(memory); }

std::int64_t page_bytes() { return std::int64_t{32} << 20; }  // a multiple of every GPU's granularity (2 MiB)
std::byte* reserve_addresses(std::int64_t bytes) {
  CUdeviceptr address = 0;
  ESPALIER_DRIVER(cuMemAddressReserve, &address, static_cast<std::size_t>(bytes), 0, 0, 0);
  return reinterpret_cast<std::byte*>(address);
}
void give_back_addresses(std::byte* memory, std::int64_t bytes) {
  ESPALIER_DRIVER(cuMemAddressFree, reinterpret_cast<CUdeviceptr>(memory), static_cast<std::size_t>(bytes));
}
Page take_page() {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, work().index};
  CUmemGenericAllocationHandle page = 0;
  ESPALIER_DRIVER(cuMemCreate, &page, static_cast<std::size_t>(page_bytes()), &properties, 0);
  return page;
}
void give_back_page(Page page) { ESPALIER_DRIVER(cuMemRelease, page); }
void map_page(Page page, std::byte* at) {
  const auto address = reinterpret_cast<CUdeviceptr>(at);
  const auto size = static_cast<std::size_t>(page_bytes());
  const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, work().index}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  ESPALIER_DRIVER(cuMemMap, address, size, 0, page, 0);
  ESPALIER_DRIVER(cuMemSetAccess, address, size, &access, 1);
}
void unmap_page(Page, std::byte* at) {
  ESPALIER_DRIVER(cuMemUnmap, reinterpret_cast<CUdeviceptr>(at), static_cast<std::size_t>(page_bytes()));
}
std::int64_t free_memory() {
  std::size_t free = 0, total = 0;
  expect_success(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return static_cast<std::int64_t>(free);
}

std::int64_t held_memory() { return work().free_at_start - free_memory(); }

// Addresses that CUDA does not know are the host's.
bool on_device(const void* address) {
  cudaPointerAttributes attributes{};
  if (cudaPointerGetAttributes(&attributes, address) == cudaSuccess)
    return attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged;
  (void)cudaGetLastError();
  return false;
}

Stream stream() { return stream_of(Queue::compute); }
std::int64_t most_shared_bytes() { return work().most_shared_bytes; }
void allow_shared_bytes(const void* kernel, std::int64_t bytes) {
  expect_success(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
                 "the shared memory of a block");
}
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
  copy(Queue::compute, host, memory, bytes);
  const Event copied = record(Queue::compute);
  wait_until(copied);
  forget(copied);
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
