// A GPU as a device, and the one function that the program looks up in this library (device/cuda_library.h).
//
// Reserved addresses are the driver's: pages of kPage bytes come when a tensor is first viewed in them and go when they
// are given back, so that what sleeps in an arena costs no memory.
#include <cuda.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/device/cuda_library.h"
#include "espalier/device/device.h"
#include "espalier/observe/timer.h"
#include "espalier/ops/cuda/launch.h"
#include "espalier/ops/cuda/operations.h"
#include "espalier/ops/cuda/runtime.h"

namespace espalier::cuda {
namespace {

// Functions of the driver, found through the runtime: the library loads where there is no driver.
template <class Function>
Function* driver(const char* name) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found{};
  expect_success(cudaGetDriverEntryPointByVersion(name, &entry, 12000, cudaEnableDefault, &found), name);
  ESPALIER_INTERNAL(found == cudaDriverEntryPointSuccess, name);
  return reinterpret_cast<Function*>(entry);
}
#define ESPALIER_DRIVER(name, ...)                                                  \
  do {                                                                              \
    static auto* const entry = driver<decltype(name)>(#name);                       \
    const CUresult result = entry(__VA_ARGS__);                                     \
    expect_success(result == CUDA_SUCCESS               ? cudaSuccess               \
                   : result == CUDA_ERROR_OUT_OF_MEMORY ? cudaErrorMemoryAllocation \
                                                        : cudaErrorUnknown,         \
                   #name);                                                          \
  } while (false)

constexpr std::int64_t kPage = std::int64_t{32} << 20;  // a multiple of every GPU's granularity (2 MiB)

struct Range {
  std::vector<CUmemGenericAllocationHandle> pages;  // 0: none is there
};

class CudaDevice : public Device {
 public:
  explicit CudaDevice(int index) : Device(operations()), index_(index) { start(index); }

  std::string_view name() const override { return "cuda"; }
  void synchronize() override { expect_success(cudaStreamSynchronize(stream()), "the work on the GPU"); }
  std::int64_t free_bytes() override {
    std::size_t free = 0, total = 0;
    expect_success(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    return static_cast<std::int64_t>(free);
  }
  double seconds() override {
    synchronize();
    return Timer::steady_seconds();
  }

  std::byte* reserve(std::int64_t bytes) override {
    CUdeviceptr address = 0;
    const std::int64_t pages = ceil_div(bytes < 1 ? 1 : bytes, kPage);
    ESPALIER_DRIVER(cuMemAddressReserve, &address, static_cast<std::size_t>(pages * kPage), 0, 0, 0);
    ranges_[address].pages.resize(static_cast<std::size_t>(pages));
    return reinterpret_cast<std::byte*>(address);
  }
  void release(std::byte* memory, std::int64_t bytes) override {
    give_back(memory, ceil_div(bytes < 1 ? 1 : bytes, kPage) * kPage);
    const auto range = ranges_.find(reinterpret_cast<CUdeviceptr>(memory));
    ESPALIER_DRIVER(cuMemAddressFree, range->first, range->second.pages.size() * static_cast<std::size_t>(kPage));
    ranges_.erase(range);
  }
  void give_back(std::byte* memory, std::int64_t bytes) override {
    synchronize();
    const auto [begin, range] = range_of(memory);
    const std::int64_t offset = memory - begin;
    for (std::int64_t page = ceil_div(offset, kPage); (page + 1) * kPage <= offset + bytes; ++page) {
      CUmemGenericAllocationHandle& handle = range->pages[static_cast<std::size_t>(page)];
      if (handle == 0) continue;
      ESPALIER_DRIVER(cuMemUnmap, reinterpret_cast<CUdeviceptr>(begin + page * kPage), static_cast<std::size_t>(kPage));
      ESPALIER_DRIVER(cuMemRelease, handle);
      handle = 0;
    }
  }
  void copy_out(const std::byte* memory, std::int64_t bytes, std::byte* host) override {
    copy_to_host(host, memory, static_cast<std::size_t>(bytes));
  }
  void copy_in(const std::byte* host, std::int64_t bytes, std::byte* memory) override {
    map_pages(memory, bytes);
    expect_success(
        cudaMemcpyAsync(memory, host, static_cast<std::size_t>(bytes), cudaMemcpyHostToDevice, cuda::stream()),
        "a copy to the GPU");
    synchronize();
  }
  at::Tensor view(std::byte* memory, at::IntArrayRef sizes, at::ScalarType dtype) override {
    map_pages(memory, c10::multiply_integers(sizes) * static_cast<std::int64_t>(c10::elementSize(dtype)));
    return at::from_blob(memory, sizes, at::TensorOptions().dtype(dtype));
  }
  at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype) override {
    const auto bytes = c10::multiply_integers(sizes) * static_cast<std::int64_t>(c10::elementSize(dtype));
    return at::from_blob(take_scratch(static_cast<std::size_t>(bytes)), sizes, give_back_scratch,
                         at::TensorOptions().dtype(dtype));
  }

  at::Tensor to_host(const at::Tensor& tensor) override {
    at::Tensor host = host_room(tensor);
    copy(host.data_ptr(), row_of(host), tensor.data_ptr(), row_of(tensor), tensor, cudaMemcpyDeviceToHost);
    synchronize();
    return host;
  }
  at::Tensor host_room(const at::Tensor& tensor) override {
    return at::empty(tensor.sizes(), at::TensorOptions().dtype(tensor.scalar_type()));
  }
  // From pageable memory: the runtime has read it when the call returns.
  void to_device(const at::Tensor& host, const at::Tensor& tensor) override {
    const at::Tensor from = host.contiguous();
    copy(tensor.data_ptr(), row_of(tensor), from.data_ptr(), row_of(from), tensor, cudaMemcpyHostToDevice);
  }
  at::Tensor adopt(const at::Tensor& host) override {
    const at::Tensor tensor = allocate(host.sizes(), host.scalar_type());
    to_device(host, tensor);
    return tensor;
  }

 private:
  // Bytes between rows.
  static std::size_t row_of(const at::Tensor& x) {
    return static_cast<std::size_t>((x.dim() == 0 ? 1 : x.stride(0)) * x.element_size());
  }
  static void copy(void* to, std::size_t to_row, const void* from, std::size_t from_row, const at::Tensor& tensor,
                   cudaMemcpyKind kind) {
    if (tensor.numel() == 0) return;
    const auto bytes = static_cast<std::size_t>(tensor.numel() * tensor.element_size());
    if (tensor.is_contiguous()) return expect_success(cudaMemcpyAsync(to, from, bytes, kind, cuda::stream()), "a copy");
    ESPALIER_INTERNAL(tensor.select(0, 0).is_contiguous(), "a copy of rows that are not contiguous");
    const auto rows = static_cast<std::size_t>(tensor.size(0));
    expect_success(cudaMemcpy2DAsync(to, to_row, from, from_row, bytes / rows, rows, kind, cuda::stream()), "a copy");
  }

  std::pair<std::byte*, Range*> range_of(const std::byte* memory) {
    auto range = std::prev(ranges_.upper_bound(reinterpret_cast<CUdeviceptr>(memory)));
    return {reinterpret_cast<std::byte*>(range->first), &range->second};
  }
  void map_pages(const std::byte* memory, std::int64_t bytes) {
    if (bytes == 0) return;
    const auto [begin, range] = range_of(memory);
    const std::int64_t offset = memory - begin;
    for (std::int64_t page = offset / kPage; page * kPage < offset + bytes; ++page) {
      CUmemGenericAllocationHandle& handle = range->pages[static_cast<std::size_t>(page)];
      if (handle != 0) continue;
      CUmemAllocationProp properties{};
      properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
      properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, index_};
      const auto address = reinterpret_cast<CUdeviceptr>(begin + page * kPage);
      const auto size = static_cast<std::size_t>(kPage);
      ESPALIER_DRIVER(cuMemCreate, &handle, size, &properties, 0);
      ESPALIER_DRIVER(cuMemMap, address, size, 0, handle, 0);
      const CUmemAccessDesc access{properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
      ESPALIER_DRIVER(cuMemSetAccess, address, size, &access, 1);
    }
  }

  int index_;
  std::map<CUdeviceptr, Range> ranges_;
};

}  // namespace
}  // namespace espalier::cuda

extern "C" espalier::Device* espalier_open_cuda_device(int index, std::string* problem) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess || index >= count) {
    *problem = status != cudaSuccess ? cudaGetErrorString(status)
                                     : espalier::text_of(count, " GPUs, number ", index, " asked for");
    return nullptr;
  }
  cudaDeviceProp properties{};
  espalier::cuda::expect_success(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
  if (properties.major < 8) {
    *problem = espalier::text_of(properties.name, ", of compute capability ", properties.major, ".", properties.minor,
                                 "; 8.0 or newer is needed");
    return nullptr;
  }
  static espalier::cuda::CudaDevice* const device = new espalier::cuda::CudaDevice(index);  // outlives every tensor
  return device;
}
