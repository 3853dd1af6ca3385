// Prompts as JSON Lines, plain or gzip: one object a line with `prompt_ids` and optionally `group`, `id`, `meta`.
//
// Other fields are carried through and reported once, as in records of rollouts; fields that belong to a response are
// refused, because what is written would hold them twice.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "espalier/generate/sampler.h"
#include "espalier/observe/progress.h"

namespace espalier {

struct PromptFile {
  std::vector<Prompt> prompts;
  std::vector<std::string> notes;  // each unknown field once
};

// Errors: InputError with "file:line", the field, what was expected and found; ids are checked against the vocabulary.
PromptFile read_prompts(const std::string& path, std::int64_t vocabulary, Progress& progress);

// The same for one text in memory (plain or gzip); `name` stands for the file in messages.
PromptFile parse_prompts(std::string_view text, const std::string& name, std::int64_t vocabulary);

}  // namespace espalier
