// Kinds of norms and activations of a block, for the model's shape and for the kernels.
#pragma once

#include <cstdint>

namespace espalier {

// y = weight x / rms(x), and its kin. They differ in bfloat16 too: `rms` rounds x / rms(x) before the product.
enum class NormKind : std::uint8_t {
  rms,           // Llama, Qwen
  rms_once,      // rounded once (OLMo 2)
  rms_plus_one,  // (1 + weight) x / rms(x), rounded once (Gemma, Qwen3-Next)
  layer,         // weight (x - mean) / std + bias, rounded once (StarCoder2)
};

// The factor of `up`: silu(g); gelu(g) by the error function, or by tanh; or, clamped, g sigmoid(1.702 g) (up + 1)
// with g <= limit and |up| <= limit (gpt-oss); max(g, 0)^2.
enum class Activation : std::uint8_t { silu, gelu, gelu_tanh, clamped, relu_squared };

struct ActivationRule {
  Activation kind = Activation::silu;
  double limit = 0;   // of Activation::clamped
  bool gated = true;  // act = f(gate) up; false: act = f(up), and there is no gate
};

}  // namespace espalier
