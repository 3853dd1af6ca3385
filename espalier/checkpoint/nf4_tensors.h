// Matrices that bitsandbytes stored as NF4 (base/nf4.h), each as six tensors of a file:
//
//   <name>.weight                     U8, two codes in a byte, [N K / 2, 1]
//   <name>.weight.absmax              F32 [blocks]; nested: U8 [blocks]
//   <name>.weight.quant_map           F32 [16]
//   <name>.weight.nested_absmax       F32 [blocks / 256], and
//   <name>.weight.nested_quant_map    F32 [256]: where absmax is nested
//   <name>.weight.quant_state.bitsandbytes__nf4    U8, the text of a JSON object: quant_type, blocksize, dtype, shape,
//                                                  nested_blocksize, nested_offset
//
// They are read as one tensor <name>.weight of shape [N, K] in the dtype that the matrix was quantised from.
#pragma once

#include <list>
#include <map>
#include <string>

#include "espalier/checkpoint/safetensors.h"

namespace espalier {

// Replaces such tensors by one each, which `parts` keeps; its values are made when they are read. Errors: InputError
// for tensors that are missing or have another type or size, and for a JSON text that says otherwise; UnsupportedError
// for FP4 and for blocks of another size; all with `where` and the tensor's name.
void join_nf4_tensors(std::map<std::string, const SafetensorsEntry*>& tensors, std::list<SafetensorsEntry>& parts,
                      const std::string& where);

}  // namespace espalier
