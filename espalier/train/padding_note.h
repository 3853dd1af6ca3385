// The padding token of a reward model, by which transformers finds the last token of a padded row.
#pragma once

#include <filesystem>
#include <string>

namespace espalier {

// A note that names pad_token_id where config.json has none, or an end token: transformers then refuses a batch of
// padded rows, or scores it one token early. Empty where another token pads. `directory`: the model; the padding token
// of its tokenizer is named where it has one.
std::string padding_note(const std::filesystem::path& directory);

}  // namespace espalier
