// A layer of a model: its mixer, its MLP, and the places of its norms.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "espalier/shape/mixer.h"

namespace espalier {

// The places of a block's norms: x + f(norm(x)), x + norm(f(norm(x))), x + norm(f(x)).
enum class NormPlace : std::uint8_t { before, both, after };

// `none`: the layer ends with its mixer.
enum class MlpKind : std::uint8_t { dense, experts, none };

// Products of a layer, a bit each by their number (PartParameters).
struct ProductBits {
  std::uint32_t mixer = 0, mlp = 0;

  bool of_mixer(std::size_t product) const { return (mixer >> product & 1) != 0; }
  bool of_mlp(std::size_t product) const { return (mlp >> product & 1) != 0; }
  bool operator==(const ProductBits&) const = default;
};
inline constexpr ProductBits kEveryProduct{~std::uint32_t{0}, ~std::uint32_t{0}};

// The projections of a layer that have an addition (shape/additions.h), a bit each by PartParameters::number.
struct AdaptedLayer {
  std::uint32_t mixer = 0, mlp = 0;

  bool operator==(const AdaptedLayer&) const = default;
};

// The factor of a layer's result, its halves' sums with the stream; files hold it, and it never trains. Layers whose
// factors differ need the same operations.
struct OutputScale {
  double value = 1;

  bool is_used() const { return value != 1; }
  bool operator==(const OutputScale& other) const { return is_used() == other.is_used(); }
};

struct LayerShape {
  std::shared_ptr<const Mixer> mixer;
  MlpKind mlp = MlpKind::dense;
  std::int64_t inner = 0;  // F of a dense MLP
  NormPlace norm_place = NormPlace::before;
  OutputScale output_scale = {};
  bool is_read_later = false;  // layers above it read its rows of the path, too (Mixer::source): these stay in memory
  ProductBits trains = kEveryProduct;  // products whose weights or biases have gradients
  AdaptedLayer adapted = {};
  // Adapted products in any layer whose mixer, or MLP, is of the same kind: buffers have room for those.
  ProductBits adapted_alike = {};

  bool has_experts() const { return mlp == MlpKind::experts; }  // in place of a dense MLP
  bool has_norms_before() const { return norm_place != NormPlace::after; }
  bool has_norms_after() const { return norm_place != NormPlace::before; }

  // Equal layers need the same operations and bytes. Layers of one mixer share the object.
  bool operator==(const LayerShape&) const = default;
};

// So many equal layers.
inline std::vector<LayerShape> equal_layers(std::int64_t count, LayerShape layer) {
  return std::vector<LayerShape>(static_cast<std::size_t>(count), std::move(layer));
}

}  // namespace espalier
