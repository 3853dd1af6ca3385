// Directories whose config.json ties the head to the embedding, although their files hold two different matrices.
//
// transformers loads such a directory with two parameters. Trainers that save both (verl's FSDP checkpoints) write it
// if they trained them apart.
#pragma once

#include <filesystem>

#include "espalier/base/json.h"

namespace espalier {

// Sets tie_word_embeddings to false in a config where the directory's files hold an embedding and a head that differ
// in a value. Equal matrices, absent ones, and matrices in formats other than F64, F32, F16 and BF16 leave it as it is.
void untie_differing_head(const std::filesystem::path& directory, Json& config);

}  // namespace espalier
