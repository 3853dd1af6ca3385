// A short convolution (LFM2, arXiv 2511.23404): rows are gated, mixed over the last few rows channel by channel, and
// gated again. The gated inputs of the last rows are the state that a row leaves.
//
// C channels, K rows of the convolution.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "espalier/mixers/states/shape.h"
#include "espalier/shape/config_members.h"
#include "espalier/shape/layer_shape.h"

namespace espalier {

struct ShortConvolutionShape {
  std::int64_t channels = 0, kernel = 0;  // C, K
  bool bias = false;                      // of both products and of the convolution

  std::int64_t projected() const { return 3 * channels; }  // columns of a projected row: b, c, x
  std::int64_t state() const { return (kernel - 1) * channels; }
};

class ShortConvolution final : public StateMixer {
 public:
  // The numbers of its products and tensors (PartParameters).
  enum Products : std::size_t { input, output };
  enum Tensors : std::size_t { conv, conv_bias };

  explicit ShortConvolution(ShortConvolutionShape of_shape)
      : StateMixer(MixerKind::short_convolution), shape(of_shape) {}

  PartParameters parameters(std::int64_t hidden) const override;
  std::size_t output_product() const override { return output; }
  std::int64_t mixed_width() const override { return shape.channels; }
  std::shared_ptr<const Mixer> part(std::int64_t ranks) const override;
  void require(const Degrees& degrees) const override;
  Refusal refused_on_gpu(std::int64_t number_bytes) const override;
  std::string fingerprint() const override;

  std::int64_t state() const override { return shape.state(); }

  MixerFlops flops() const override;
  MixerTraffic traffic() const override;
  std::int64_t widest_row() const override { return shape.projected(); }
  std::int64_t cpu_scratch(const ScratchRows& rows) const override;
  GpuScratch gpu_scratch(const ScratchRows& rows) const override;

  const ShortConvolutionShape shape;
};

// On a GPU: parts of the rows that have sums of their own of the weights' gradients, and the longest convolution.
inline constexpr std::int64_t kGpuConvolutionParts = 64, kLongestGpuShortConvolution = 31;

// Rows and channels that a thread takes at once, and the numbers that it holds for them.
inline constexpr std::int64_t kConvolutionRows = 64, kConvolutionChannels = 64;
inline std::int64_t convolution_scratch(std::int64_t kernel) {
  return kConvolutionChannels * (2 * (kConvolutionRows + kernel - 1) + 2 * kConvolutionRows + 2 * kernel + 1);
}

// An LFM2 configuration under the names that other families use for the same members, with the width that its MLPs
// have. Errors: InputError for damaged members, UnsupportedError for members that contradict each other.
Json usual_members_of_lfm2(const Members& config);
// Gives short convolutions to the layers that layer_types calls conv, or that full_attn_idxs leaves out; attention in
// the other layers gets LFM2's names of parameters.
void read_lfm2(const Members& config, std::vector<LayerShape>& layers);

}  // namespace espalier
