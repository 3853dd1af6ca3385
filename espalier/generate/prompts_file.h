// Prompts as JSON Lines, plain, gzip or zstd, or in verl's Parquet layout: one object a line (a row) with `prompt`, a
// text or a list of chat messages, or `prompt_ids`; optionally `id`, `meta`, `group` (in every record or in none), and
// the arguments of a reward: `data_source`, `ground_truth` (or `reward_model` with it), `extra_info`. Beside messages,
// `tools` and `chat_template_kwargs` are arguments of the chat template.
//
// Other fields are carried through and reported once, as in records of rollouts; fields that belong to a response are
// refused, because what is written would hold them twice.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "espalier/generate/sampler.h"
#include "espalier/metrics/progress.h"
#include "espalier/services/tokenizer.h"

namespace espalier {

struct PromptFile {
  std::vector<Prompt> prompts;
  std::vector<std::string> notes;  // each unknown field once
  bool has_text = false;           // some prompts were text, or messages
};

// Text becomes tokens by `tokenizer`. A prompt that was text carries `prompt`, the text that the model sees, and
// `messages` if it was given as messages; `prompt_ids` beside a `prompt` override its text.
// Errors: InputError with "file:line", the field, what was expected and found; ids are checked against the vocabulary.
// Also errors of PythonRecords for Parquet, and of Tokenizer.
// `columns`: --columns, the user's names of fields. Errors also: as column_names.
PromptFile read_prompts(const std::string& path, std::int64_t vocabulary, LazyTokenizer& tokenizer, Progress& progress,
                        const std::string& columns = "");

// The same for JSON Lines in memory (plain, gzip or zstd); `name` stands for the file in messages.
PromptFile parse_prompts(std::string_view text, const std::string& name, std::int64_t vocabulary,
                         LazyTokenizer& tokenizer, const std::string& columns = "");

}  // namespace espalier
