// The functions of the CUDA runtime, the driver and cuBLAS that ops/cuda/runtime.cpp calls, told to the recorder.
#include <cublas_v2.h>
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstring>

#include "tests/cuda/calls/recorder.h"

namespace {

using espalier::testing::Recorder;
using Place = Recorder::Place;

Recorder& told(const char* name) {
  Recorder::one().called(name);
  return Recorder::one();
}

void* at(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

// ---- the driver, which the runtime hands out by name ----

CUresult reserve_addresses(CUdeviceptr* address, std::size_t bytes, std::size_t, CUdeviceptr, unsigned long long) {
  *address = reinterpret_cast<CUdeviceptr>(told("cuMemAddressReserve").reserve(bytes));
  return CUDA_SUCCESS;
}
CUresult free_addresses(CUdeviceptr address, std::size_t bytes) {
  told("cuMemAddressFree").free_addresses(at(address), bytes);
  return CUDA_SUCCESS;
}
CUresult make_page(CUmemGenericAllocationHandle* page, std::size_t, const CUmemAllocationProp*, unsigned long long) {
  *page = told("cuMemCreate").make_page();
  return CUDA_SUCCESS;
}
CUresult release_page(CUmemGenericAllocationHandle page) {
  told("cuMemRelease").release(page);
  return CUDA_SUCCESS;
}
CUresult map(CUdeviceptr address, std::size_t bytes, std::size_t, CUmemGenericAllocationHandle page,
             unsigned long long) {
  told("cuMemMap").map(at(address), bytes, page);
  return CUDA_SUCCESS;
}
CUresult allow(CUdeviceptr address, std::size_t bytes, const CUmemAccessDesc*, std::size_t) {
  told("cuMemSetAccess").allow(at(address), bytes);
  return CUDA_SUCCESS;
}
CUresult unmap(CUdeviceptr address, std::size_t bytes) {
  told("cuMemUnmap").unmap(at(address), bytes);
  return CUDA_SUCCESS;
}

const std::map<std::string, void*>& driver() {
  const auto entry = [](auto* function) { return reinterpret_cast<void*>(function); };
  static const std::map<std::string, void*> functions = {
      {"cuMemAddressReserve", entry(static_cast<decltype(&cuMemAddressReserve)>(reserve_addresses))},
      {"cuMemAddressFree", entry(static_cast<decltype(&cuMemAddressFree)>(free_addresses))},
      {"cuMemCreate", entry(static_cast<decltype(&cuMemCreate)>(make_page))},
      {"cuMemRelease", entry(static_cast<decltype(&cuMemRelease)>(release_page))},
      {"cuMemMap", entry(static_cast<decltype(&cuMemMap)>(map))},
      {"cuMemSetAccess", entry(static_cast<decltype(&cuMemSetAccess)>(allow))},
      {"cuMemUnmap", entry(static_cast<decltype(&cuMemUnmap)>(unmap))}};
  return functions;
}

}  // namespace

extern "C" {

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** entry, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  const auto function = driver().find(name);
  *found = function == driver().end() ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  if (function != driver().end()) *entry = function->second;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "an error"; }
cudaError_t cudaSetDevice(int) {
  told("cudaSetDevice");
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 227 << 10;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  *pool = nullptr;
  return cudaSuccess;
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  told("cudaStreamCreateWithFlags")
      .expect(flags == cudaStreamNonBlocking, "a stream that waits for the default stream");
  *stream = static_cast<cudaStream_t>(Recorder::one().make_stream());
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = static_cast<cudaEvent_t>(told("cudaEventCreate").make_event());
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  told("cudaEventRecord").record(event, stream);
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  told("cudaStreamWaitEvent").wait(stream, event);
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  told("cudaEventSynchronize").synchronize(event);
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  return told("cudaEventQuery").happened(event) ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  told("cudaEventElapsedTime").time_between(begin, end);
  *milliseconds = 1;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  *memory = told("cudaMalloc").take(Place::scratch, bytes);
  return cudaSuccess;
}
cudaError_t cudaMallocAsync(void** memory, std::size_t bytes, cudaStream_t) {
  *memory = told("cudaMallocAsync").take(Place::scratch, bytes);
  return cudaSuccess;
}
cudaError_t cudaFreeAsync(void* memory, cudaStream_t stream) {
  told("cudaFreeAsync").give_back_in(stream, memory);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned) {
  *memory = told("cudaHostAlloc").take(Place::pinned, bytes);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* memory) {
  told("cudaFreeHost").give_back(Place::pinned, memory);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  *free = *total = std::size_t{1} << 30;
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  attributes->type = Recorder::one().on_device(address) ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  told("cudaMemcpyAsync").copy(stream, to, bytes, from, bytes, bytes, 1);
  return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_stride, const void* from, std::size_t from_stride,
                              std::size_t width, std::size_t rows, cudaMemcpyKind, cudaStream_t stream) {
  told("cudaMemcpy2DAsync").copy(stream, to, to_stride, from, from_stride, width, rows);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes, cudaStream_t stream) {
  told("cudaMemsetAsync").expect(value == 0, "memory is set to what is not 0");
  Recorder::one().zero(stream, memory, bytes);
  return cudaSuccess;
}

cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) {
  *handle = nullptr;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetStream_v2(cublasHandle_t, cudaStream_t) { return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t, void*, std::size_t) { return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasSetMathMode(cublasHandle_t, cublasMath_t) { return CUBLAS_STATUS_SUCCESS; }
const char* cublasGetStatusString(cublasStatus_t) { return "an error"; }
cublasStatus_t cublasGemmEx_64(cublasHandle_t, cublasOperation_t, cublasOperation_t, std::int64_t, std::int64_t,
                               std::int64_t, const void*, const void*, cudaDataType, std::int64_t, const void*,
                               cudaDataType, std::int64_t, const void*, void*, cudaDataType, std::int64_t,
                               cublasComputeType_t, cublasGemmAlgo_t) {
  told("cublasGemmEx_64").expect(false, "a product, whose numbers nobody computes here");
  return CUBLAS_STATUS_SUCCESS;
}

}  // extern "C"
