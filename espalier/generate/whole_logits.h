// The logits of the whole vocabulary, on every rank of tp: all of them choose the same tokens.
//
// Shapes: B rows, V columns of the vocabulary.
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/device/arena.h"
#include "espalier/model/decoder.h"

namespace espalier {

// Joins the parts of all ranks, in rooms of the arena; alone, logits_BV itself. Every rank of tp calls it.
at::Tensor whole_logits(const Decoder& decoder, const at::Tensor& logits_BV, Arena& arena);

}  // namespace espalier
