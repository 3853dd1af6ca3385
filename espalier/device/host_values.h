// Values of a tensor in the host's memory, after Device::to_host or before Device::to_device.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <type_traits>

namespace espalier {

// Contiguous, of dtype T.
template <class T>
std::span<T> host_values(const at::Tensor& host) {
  return {host.mutable_data_ptr<std::remove_const_t<T>>(), static_cast<std::size_t>(host.numel())};
}

// Whatever the dtype, for readers and writers of files.
inline void* host_bytes(const at::Tensor& host) { return host.data_ptr(); }

}  // namespace espalier
