// The operands of each compiled version of the kernels: base/simd.h's three sets, and for bfloat16 three more that
// multiply pairs. Per instruction set; included by forward.cpp and backward.cpp.
#pragma once

#if defined(ESPALIER_BFLOAT16_DOT) || defined(ESPALIER_BFLOAT16_TILES) || defined(ESPALIER_BFLOAT16_EMULATED_TILES)
#include "espalier/ops/cpu/attention/paired_operands.h"
#include "espalier/ops/cpu/attention/tiles.h"
#else
#include "espalier/ops/cpu/attention/operands.h"
#endif

namespace espalier::ESPALIER_SIMD {

#if defined(ESPALIER_BFLOAT16_DOT)
using PairedProducts = VectorProducts;
#elif defined(ESPALIER_BFLOAT16_TILES)
using PairedProducts = TileProducts<HardwareTiles>;
#elif defined(ESPALIER_BFLOAT16_EMULATED_TILES)
using PairedProducts = TileProducts<EmulatedTiles>;
#else
#define ESPALIER_PLAIN_OPERANDS
#endif

}  // namespace espalier::ESPALIER_SIMD

// Calls instantiate(T, operands of T) for every type this version has.
#ifdef ESPALIER_PLAIN_OPERANDS
#define ESPALIER_EACH_TYPE(instantiate)                                               \
  instantiate(float, PlainOperands<float>) instantiate(double, PlainOperands<double>) \
      instantiate(bfloat16, PlainOperands<bfloat16>)
#else
#define ESPALIER_EACH_TYPE(instantiate) instantiate(bfloat16, PairedOperands<PairedProducts>)
#endif
