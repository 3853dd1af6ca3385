// On a device with queues the head's next block of logits is under way before the host waits for this one's log-probs.
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "espalier/device/arena.h"
#include "espalier/device/control_block.h"
#include "espalier/objective/fused_head.h"
#include "espalier/objective/head_buffers.h"
#include "espalier/ops/cuda/device.h"
#include "espalier/ops/operations.h"
#include "tests/cuda/emulated_runtime.h"

namespace espalier::testing {
namespace {

std::vector<std::string> told;

// A GPU's host code that tells what the host gives and waits for.
class Watched : public cuda::CudaDevice {
 public:
  Watched() : CudaDevice(watched_operations(), "watched") {}
  Coming start_to_host(const at::Tensor& tensor) override {
    told.push_back("copy");
    return CudaDevice::start_to_host(tensor);
  }
  at::Tensor arrived(const Coming& coming) override {
    told.push_back("wait");
    return CudaDevice::arrived(coming);
  }

 private:
  static const Operations& watched_operations() {
    static const Operations all = [] {
      Operations watched = streamed_device().operations();
      watched.linear = [](const at::Tensor& out, const at::Tensor& x, const at::Tensor& weight,
                          const at::Tensor& bias) {
        told.push_back("product");
        streamed_device().operations().linear(out, x, weight, bias);
      };
      watched.logit_gradients = [](const EdgeBlock& edges, std::int64_t first, const LogitSums& sums,
                                   const at::Tensor& by_logprob, const at::Tensor& by_entropy,
                                   const at::Tensor& logits) {
        told.push_back("gradient");
        streamed_device().operations().logit_gradients(edges, first, sums, by_logprob, by_entropy, logits);
      };
      return watched;
    }();
    return all;
  }
};

// One edge a row, to the tokens in turn.
void hand_over(HeadEdges& to, Device& device, std::int64_t outputs, std::int64_t vocabulary, double temperature) {
  std::vector<HeadEdge> edges;
  for (std::int64_t o = 0; o < outputs; ++o)
    edges.push_back({static_cast<std::int32_t>(o), static_cast<std::int32_t>(o % vocabulary)});
  ControlBlock block;
  to.add_to(block, std::vector<double>(static_cast<std::size_t>(outputs), temperature), edges, vocabulary);
  block.hand_over(device);
}

// A pass over three blocks of 256, 256 and 88 rows. The arena holds what is planned and no more.
void head_pass(at::ScalarType dtype) {
  constexpr std::int64_t kOutputs = 600, kWidth = 16, kVocabulary = 40;
  static auto* const device = new Watched;  // outlives every tensor
  HeadEdges handed_over;
  hand_over(handed_over, *device, kOutputs, kVocabulary, 1.0);
  const auto ones = [&](std::int64_t rows, at::ScalarType of) { return device->adopt(at::ones({rows, kWidth}, of)); };
  const HeadGradients out{ones(kOutputs, dtype), ones(kVocabulary, dtype == at::kBFloat16 ? at::kFloat : dtype)};
  Arena arena(std::int64_t{1} << 22, *device);
  told.clear();
  add_head_forward_backward(
      {ones(kOutputs, dtype), ones(kVocabulary, dtype), handed_over},
      [](std::size_t, std::span<const double>, std::span<const double>, std::span<double> by_logprob,
         std::span<double> by_entropy) {
        told.push_back("host");
        std::ranges::fill(by_logprob, 1.0);
        std::ranges::fill(by_entropy, 0.0);
      },
      out, arena);
  device->synchronize();
  const ElementBytes bytes = dtype == at::kDouble ? ElementBytes{8, 8} : ElementBytes{2, 4};
  EXPECT_EQ(arena.high_water(), HeadBuffers(bytes, kOutputs, kVocabulary, kWidth, true, {.ahead = true}).peak());
}

TEST(HeadAhead, TheNextProductIsQueuedBeforeTheHostWaits) {
  const std::vector<std::string> wanted{"product", "copy",                                 // first
                                        "product", "copy", "wait",    "host", "gradient",  // second, first
                                        "product", "copy", "wait",    "host", "gradient",  // third, second
                                        "wait",    "host", "gradient"};
  for (const at::ScalarType dtype : {at::kDouble, at::kBFloat16}) {
    head_pass(dtype);
    EXPECT_EQ(told, wanted);
  }
}

// In bfloat16 products of a GPU take the factors as they are and write float32; the gradient of the logits is the one
// factor that is rounded first. Its terms are then off by 2^-8 of their size, and a result in bfloat16 by as much
// again; what float32 leaves is below a twentieth of that.
TEST(HeadOnKernels, InBfloat16IsOffByTheRoundingOfTheLogitsGradient) {
  constexpr std::int64_t kOutputs = 70, kWidth = 24, kVocabulary = 56;
  constexpr double kRounding = 1.05 / 256;
  Device& device = emulated_device();
  HeadEdges handed_over;
  hand_over(handed_over, device, kOutputs, kVocabulary, 0.8);
  at::manual_seed(5);
  const at::Tensor hidden = at::randn({kOutputs, kWidth}).to(at::kBFloat16);
  const at::Tensor weight = at::randn({kVocabulary, kWidth}).mul_(0.5).to(at::kBFloat16);
  const auto derivative_of = [](std::size_t edge) { return static_cast<double>(edge % 7) - 3; };
  const HeadGradients out{device.adopt(at::zeros({kOutputs, kWidth}, at::kBFloat16)),
                          device.adopt(at::zeros({kVocabulary, kWidth}, at::kFloat))};
  Arena arena(std::int64_t{1} << 22, device);
  add_head_forward_backward(
      {device.adopt(hidden), device.adopt(weight), handed_over},
      [&](std::size_t first, std::span<const double>, std::span<const double>, std::span<double> by_logprob,
          std::span<double> by_entropy) {
        for (std::size_t e = 0; e < by_logprob.size(); ++e) by_logprob[e] = derivative_of(first + e);
        std::ranges::fill(by_entropy, 0.0);
      },
      out, arena);
  const at::Tensor grad_hidden = device.to_host(out.grad_hidden_OM).to(at::kDouble);
  const at::Tensor grad_weight = device.to_host(out.grad_weight_VM).to(at::kDouble);
  const HeadBuffers planned(ElementBytes{2, 4}, kOutputs, kVocabulary, kWidth, true,
                            {.ahead = true, .writes_sums = true});
  EXPECT_EQ(arena.high_water(), planned.peak());

  const at::Tensor h = hidden.to(at::kDouble), w = weight.to(at::kDouble);
  at::Tensor grad_logits = -at::softmax(at::mm(h, w.t()) / 0.8, 1);
  for (std::int64_t o = 0; o < kOutputs; ++o) {
    grad_logits[o][o % kVocabulary] += 1;
    grad_logits[o] *= derivative_of(static_cast<std::size_t>(o)) / 0.8;
  }
  const at::Tensor true_hidden = at::mm(grad_logits, w), true_weight = at::mm(grad_logits.t(), h);
  const at::Tensor hidden_bound = kRounding * (at::mm(grad_logits.abs(), w.abs()) + true_hidden.abs());
  EXPECT_LE(((grad_hidden - true_hidden).abs() - hidden_bound).max().item<double>(), 0);
  EXPECT_LE(
      ((grad_weight - true_weight).abs() - kRounding * at::mm(grad_logits.abs().t(), h.abs())).max().item<double>(), 0);
  EXPECT_GT((grad_weight - true_weight).abs().max().item<double>(), 0);
}

}  // namespace
}  // namespace espalier::testing
