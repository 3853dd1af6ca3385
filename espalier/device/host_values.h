// Access to the values of a host tensor, after Device::to_host or before Device::to_device.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <type_traits>

namespace espalier {

// `host` must be contiguous and of dtype T.
template <class T>
std::span<T> host_values(const at::Tensor& host) {
  return {host.mutable_data_ptr<std::remove_const_t<T>>(), static_cast<std::size_t>(host.numel())};
}

// For any dtype; used by readers and writers of files.
inline void* host_bytes(const at::Tensor& host) { return host.data_ptr(); }

}  // namespace espalier
