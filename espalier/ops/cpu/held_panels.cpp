#include "espalier/ops/cpu/held_panels.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <map>
#include <mutex>
#include <shared_mutex>

#include "espalier/ops/cpu/own_products.h"
#include "espalier/ops/dispatch.h"

namespace espalier {
namespace {

constexpr std::int64_t kAlignment = 64;

struct Held {
  std::int64_t outputs, inputs;
  at::ScalarType dtype;
  const void* panels;
};

class Registry {
 public:
  const void* find(const at::Tensor& weight_KN, at::ScalarType dtype) {
    const std::shared_lock lock(mutex_);
    if (held_.empty()) return nullptr;
    const auto found = held_.find(weight_KN.const_data_ptr());
    if (found == held_.end()) return nullptr;
    const Held& held = found->second;
    // Packed as contiguous [N, K].
    const bool whole = held.outputs == weight_KN.size(1) && held.inputs == weight_KN.size(0) && held.dtype == dtype &&
                       weight_KN.stride(0) == 1 && weight_KN.stride(1) == held.inputs;
    return whole ? held.panels : nullptr;
  }
  bool add(const at::Tensor& weight_NK, at::ScalarType dtype, const void* panels) {
    const std::unique_lock lock(mutex_);
    return held_.emplace(weight_NK.const_data_ptr(), Held{weight_NK.size(0), weight_NK.size(1), dtype, panels}).second;
  }
  void remove(const at::Tensor& weight_NK) {
    const std::unique_lock lock(mutex_);
    held_.erase(weight_NK.const_data_ptr());
  }

 private:
  std::shared_mutex mutex_;
  std::map<const void*, Held> held_;
};

Registry& registry() {
  static Registry of_process;
  return of_process;
}

std::int64_t bytes_of_panels(const at::Tensor& weight_NK, at::ScalarType dtype) {
  std::int64_t bytes = 0;
  dispatch(dtype, [&]<class T>() { bytes = own_products::panel_bytes<T>(weight_NK.size(0), weight_NK.size(1)); });
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

class Handle {
 public:
  Handle(const std::vector<at::Tensor>& weights_NK, at::ScalarType dtype, std::int64_t bytes)
      : memory_(at::empty({bytes + kAlignment}, at::kByte)) {
    std::byte* to = static_cast<std::byte*>(memory_.mutable_data_ptr());
    to += -reinterpret_cast<std::intptr_t>(to) & (kAlignment - 1);
    std::vector<std::byte*> places;
    for (const at::Tensor& weight : weights_NK) {
      places.push_back(to);
      to += bytes_of_panels(weight, dtype);
    }
    at::parallel_for(0, static_cast<std::int64_t>(weights_NK.size()), 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const at::Tensor& weight = weights_NK[static_cast<std::size_t>(i)];
        dispatch(dtype, [&]<class T>() {
          own_products::Factor<T> factor{nullptr, weight.size(1), true};
          if (weight.scalar_type() == dtype)
            factor.data = pointer<T>(weight);
          else
            factor.narrow = pointer<bfloat16>(weight);
          own_products::pack_panels<T>(factor, weight.size(0), weight.size(1), places[static_cast<std::size_t>(i)]);
        });
      }
    });
    for (std::size_t i = 0; i < weights_NK.size(); ++i)
      if (registry().add(weights_NK[i], dtype, places[i])) weights_NK_.push_back(weights_NK[i]);
  }
  ~Handle() {
    for (const at::Tensor& weight : weights_NK_) registry().remove(weight);
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

 private:
  at::Tensor memory_;
  std::vector<at::Tensor> weights_NK_;  // their addresses are nobody else's while they are held
};

}  // namespace

std::shared_ptr<void> hold_panels(const std::vector<at::Tensor>& weights_NK, at::ScalarType dtype,
                                  std::int64_t most_bytes) {
  std::vector<at::Tensor> held;
  std::int64_t bytes = 0;
  for (const at::Tensor& weight : weights_NK) {
    if (!weight.defined() || weight.dim() != 2 || weight.numel() == 0 || !weight.is_contiguous() ||
        weight.scalar_type() == at::kByte)
      continue;
    held.push_back(weight);
    bytes += bytes_of_panels(weight, dtype);
  }
  if (held.empty() || bytes > most_bytes) return nullptr;
  return std::make_shared<Handle>(held, dtype, bytes);
}

const void* held_panels(const at::Tensor& weight_KN, at::ScalarType dtype) { return registry().find(weight_KN, dtype); }

}  // namespace espalier
