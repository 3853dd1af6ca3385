#include "espalier/generate/prompts_file.h"

#include <algorithm>
#include <memory>

#include "espalier/base/error.h"
#include "espalier/rollout/byte_stream.h"
#include "espalier/rollout/line_reader.h"
#include "espalier/rollout/record_fields.h"
#include "espalier/rollout/record_format.h"

namespace espalier {
namespace {

constexpr std::string_view kResponseFields[] = {
    "response_ids", "loss_mask",   "reward",           "advantage", "logprobs", "entropies",     "old_logprobs",
    "ref_logprobs", "temperature", "rollout_logprobs", "values",    "returns",  "finish_reason", "step"};

Prompt read_prompt(RecordReader& reader, std::string_view line, const RecordPlace& place) {
  Prompt prompt;
  bool seen = false;
  for_each_member(reader.parser, line, place, [&](std::string_view key, JsonValue value) {
    if (key == "prompt_ids") {
      read_token_ids(value, place, key, reader.vocabulary, ListShape::flat, prompt.ids);
      seen = true;
    } else if (key == "group") {
      if (!is_null(value)) prompt.group = read_scalar_text(value, place, key);
    } else if (std::ranges::find(kResponseFields, key) != std::end(kResponseFields)) {
      throw place.wrong(key, "a prompt: prompt_ids, and optionally group, id, meta", "a field of a response",
                        "Keep the prompts of a file of rollouts, one line for each");
    } else {
      if (key != "id" && key != "meta") reader.unknown_fields.try_emplace(std::string(key), place.where());
      add_carried(prompt.carried, key, read_raw(value, place, key));
    }
  });
  if (!seen) throw place.wrong("prompt_ids", "this field in every record", "none");
  if (prompt.ids.empty()) throw place.wrong("prompt_ids", "at least one token", "an empty list");
  prompt.where = place.where();
  return prompt;
}

// Ordinals stand for groups that are not given; beside given ones they could be mistaken for one of them.
void check_groups(const std::vector<Prompt>& prompts) {
  const bool given = !prompts.front().group.empty();
  for (const Prompt& prompt : prompts)
    if (prompt.group.empty() == given)
      throw InputError({prompt.where + ": group", "this field in every record, or in none",
                        given ? "none here" : "one here and none in " + prompts.front().where, ""});
}

PromptFile read_all(std::unique_ptr<ByteStream> stream, const std::string& name, std::int64_t vocabulary,
                    const std::function<void(std::int64_t)>& refilled) {
  PromptFile file;
  RecordReader reader;
  reader.vocabulary = vocabulary;
  stream = unpacked(std::move(stream), name);
  LineReader lines(*stream, name, refilled);
  for (Line line; lines.next(line);)
    file.prompts.push_back(read_prompt(reader, line.text, {name, line.number, line.ends_file}));
  if (file.prompts.empty()) throw InputError({name, "at least one prompt", "none", "Was it written completely?"});
  check_groups(file.prompts);
  for (const auto& [field, where] : reader.unknown_fields)
    file.notes.push_back("unknown field \"" + field + "\" is kept and not used (first at " + where + ")");
  return file;
}

}  // namespace

PromptFile read_prompts(const std::string& path, std::int64_t vocabulary, Progress& progress) {
  std::int64_t total = 0;
  auto stream = open_file_bytes(path, total);
  progress.begin("reading prompts", total, "bytes");
  PromptFile file =
      read_all(std::move(stream), path, vocabulary, [&](std::int64_t done) { progress.advance_to(done); });
  progress.end();
  return file;
}

PromptFile parse_prompts(std::string_view text, const std::string& name, std::int64_t vocabulary) {
  return read_all(memory_bytes(text), name, vocabulary, {});
}

}  // namespace espalier
