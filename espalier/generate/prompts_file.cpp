#include "espalier/generate/prompts_file.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <memory>

#include "espalier/base/error.h"
#include "espalier/base/json.h"
#include "espalier/options/column_names.h"
#include "espalier/rollout/byte_stream.h"
#include "espalier/rollout/json_text.h"
#include "espalier/rollout/line_reader.h"
#include "espalier/rollout/python_records.h"
#include "espalier/rollout/record_data.h"
#include "espalier/rollout/record_fields.h"
#include "espalier/rollout/record_format.h"
#include "espalier/services/rollout_text.h"

namespace espalier {
namespace {

// Besides the rows of record_data.h.
constexpr std::string_view kResponseFields[] = {
    "response_ids",      "response",    "loss_mask",     "reward", "advantage",    "logprobs", "entropies",
    "reward_extra_info", "temperature", "finish_reason", "turns",  "turn_rewards", "kept_ids", "step"};
constexpr std::string_view kCarriedFields[] = {"id",         "meta",         "data_source", "ground_truth",
                                               "extra_info", "reward_model", "ability"};

using JsonType = simdjson::ondemand::json_type;

// A prompt that is text or messages: its JSON, and its place among the prompts.
struct TextPrompt {
  std::size_t place;
  std::string json;
};

struct PromptLines {
  PromptFile file;
  std::vector<TextPrompt> texts;
  RecordReader reader;
  std::map<std::string, std::string, std::less<>> columns;  // of the user: name there -> name here
  std::map<std::string, std::string> without_template;      // arguments of a template beside a text: name -> where
};

JsonType type_of(JsonValue& value, const RecordPlace& place, std::string_view field) {
  JsonType type{};
  if (value.type().get(type)) throw place.wrong(field, "a JSON value", "another value");
  return type;
}

void check_type(JsonValue& value, JsonType wanted, const char* name, const RecordPlace& place, std::string_view field) {
  if (type_of(value, place, field) != wanted)
    throw place.wrong(field, name, std::string(read_raw(value, place, field).substr(0, 80)));
}

// A lone surrogate passes as JSON, but no tokenizer and no reward function could be handed it.
std::string_view read_whole_text(JsonValue& value, const RecordPlace& place, std::string_view key) {
  const std::string_view raw = read_raw(value, place, key);
  if (raw.find("\\u") != raw.npos && !Json::accept(raw))
    throw place.wrong(key, "text that UTF-8 can encode",
                      "a lone surrogate (an escape of \\ud800 to \\udfff without its other half)",
                      "Correct the escape, or write the character itself");
  return raw;
}

// The raw JSON of `prompt`: a string or a list.
std::string read_prompt_text(JsonValue value, const RecordPlace& place) {
  const JsonType type = type_of(value, place, "prompt");
  const std::string raw(read_whole_text(value, place, "prompt"));
  const bool list = type == JsonType::array;
  if (!list && type != JsonType::string)
    throw place.wrong("prompt", "a text, or a list of chat messages with role and content", raw.substr(0, 80));
  if (list &&
      std::ranges::all_of(raw, [](char c) { return std::string_view("[] \t\n\r").find(c) != std::string_view::npos; }))
    throw place.wrong("prompt", "at least one message", "an empty list");
  return raw;
}

void read_carried(JsonValue value, const RecordPlace& place, std::string_view key, Prompt& prompt) {
  if (key == "data_source") check_type(value, JsonType::string, "a text", place, key);
  if (key == "extra_info" || key == "reward_model") check_type(value, JsonType::object, "an object", place, key);
  add_carried(prompt.carried, key, read_whole_text(value, place, key));
}

bool is_renamed(const PromptLines& lines, std::string_view name) {
  return std::ranges::any_of(lines.columns, [&](const auto& column) { return column.second == name; });
}

void read_prompt(PromptLines& lines, std::string_view line, const RecordPlace& place) {
  Prompt prompt;
  std::string text;
  std::vector<std::string> for_template;
  for_each_member(lines.reader.parser, line, place, [&](std::string_view column, JsonValue value) {
    const auto renamed = lines.columns.find(column);
    const std::string_view key = renamed == lines.columns.end() ? column : renamed->second;
    if (renamed == lines.columns.end() && is_renamed(lines, key)) return;  // another column stands for it
    if (find_series(key) || std::ranges::find(kResponseFields, key) != std::end(kResponseFields))
      throw place.wrong(
          key, "a prompt: prompt or prompt_ids, and fields to copy", "a field of a response",
          "A record with a response is a rollout: give it as --rollouts to train, score or verify, or keep only "
          "its prompt to sample it again");
    const bool meant = std::ranges::find(kCarriedFields, key) != std::end(kCarriedFields);
    if (key != "id" && key != "meta" && is_null(value)) return;  // a field left open
    if (key == "prompt_ids") {
      read_token_ids(value, place, key, lines.reader.vocabulary, ListShape::flat, prompt.ids);
      if (prompt.ids.empty()) throw place.wrong("prompt_ids", "at least one token", "an empty list");
    } else if (key == "prompt") {
      text = read_prompt_text(value, place);
    } else if (key == "group") {
      prompt.group = read_scalar_text(value, place, key);
    } else {
      if (is_template_field(key))
        for_template.emplace_back(key);
      else if (!meant)
        lines.reader.unknown_fields.try_emplace(std::string(key), place.where());
      read_carried(value, place, key, prompt);
    }
  });
  if (prompt.ids.empty() && text.empty())
    throw place.wrong("prompt", "a prompt in every record: this field, or prompt_ids", "neither",
                      lines.columns.empty() ? "A prompt in a field of another name: --columns prompt=NAME"
                                            : "Are the fields of --columns those of the file?");
  prompt.where = place.where();
  const bool messages = text.starts_with('[');
  if (messages) add_carried(prompt.carried, "messages", text);
  if (!prompt.ids.empty() && !text.empty() && !messages) add_carried(prompt.carried, "prompt", text);
  const bool by_template = messages && prompt.ids.empty();
  if (!by_template)
    for (const std::string& field : for_template) lines.without_template.try_emplace(field, prompt.where);
  if (by_template) text = chat_of(std::move(text), template_fields(prompt.carried));
  if (prompt.ids.empty()) lines.texts.push_back({lines.file.prompts.size(), std::move(text)});
  lines.file.prompts.push_back(std::move(prompt));
}

void encode_texts(PromptLines& lines, LazyTokenizer& tokenizer, Progress& progress) {
  std::vector<std::string> texts;
  for (TextPrompt& text : lines.texts) texts.push_back(std::move(text.json));
  const auto prompt_at = [&](std::size_t text) -> Prompt& { return lines.file.prompts[lines.texts[text].place]; };
  progress.begin("tokenizing prompts", static_cast<std::int64_t>(texts.size()), "prompts");
  std::vector<EncodedPrompt> encoded = tokenizer.get().encode(
      texts, [&](std::size_t text) { return prompt_at(text).where; },
      [&](std::size_t done) { progress.advance_to(static_cast<std::int64_t>(done)); });
  progress.end();
  for (std::size_t text = 0; text < texts.size(); ++text) {
    Prompt& prompt = prompt_at(text);
    prompt.ids = std::move(encoded[text].ids);
    if (prompt.ids.empty()) throw InputError({prompt.where + ": prompt", "at least one token", "an empty text", ""});
    const std::int32_t highest = *std::ranges::max_element(prompt.ids);
    if (lines.reader.vocabulary > 0 && highest >= lines.reader.vocabulary)
      throw InputError({prompt.where + ": prompt", text_of("token ids of the model, below ", lines.reader.vocabulary),
                        text_of("token id ", highest, " from the tokenizer"),
                        "tokenizer and weights in " + tokenizer.get().directory() + " do not belong together"});
    carry_text(prompt.carried, "prompt", encoded[text].text);
  }
}

// Ordinals stand for groups that are not given; beside given ones they could be mistaken for one of them.
void check_groups(const std::vector<Prompt>& prompts) {
  const bool given = !prompts.front().group.empty();
  for (const Prompt& prompt : prompts)
    if (prompt.group.empty() == given)
      throw InputError({prompt.where + ": group", "this field in every record, or in none",
                        given ? "none here" : "one here and none in " + prompts.front().where, ""});
}

bool is_parquet(const std::string& path) {
  std::int64_t bytes = 0;
  std::error_code error;
  if (path.ends_with(".parquet")) return true;
  if (!std::filesystem::is_regular_file(path, error)) return false;  // a look into a pipe takes its first bytes away
  std::array<char, 4> start{};
  const std::size_t got = open_file_bytes(path, bytes)->read(start.data(), start.size());
  return std::string_view(start.data(), got) == "PAR1";
}

PromptFile read_all(ByteStream& stream, const std::string& name, std::int64_t vocabulary, LazyTokenizer& tokenizer,
                    Progress& progress, const std::string& columns, const std::function<void(std::int64_t)>& refilled) {
  PromptLines lines;
  lines.columns = column_names(columns, {"prompt", "prompt_ids", "ground_truth", "reward_model", "data_source",
                                         "extra_info", "group", "id", "tools", "chat_template_kwargs"});
  lines.reader.vocabulary = vocabulary;
  LineReader reader(stream, name, refilled);
  for (Line line; reader.next(line);) read_prompt(lines, line.text, {name, line.number, line.ends_file});
  progress.end();
  PromptFile& file = lines.file;
  if (file.prompts.empty()) throw InputError({name, "at least one prompt", "none", "Was it written completely?"});
  check_groups(file.prompts);
  file.has_text = !lines.texts.empty();
  if (file.has_text) encode_texts(lines, tokenizer, progress);
  for (const auto& [field, where] : lines.reader.unknown_fields)
    file.notes.push_back("unknown field \"" + field + "\" is kept and not used (first at " + where + ")");
  for (const auto& [field, where] : lines.without_template)
    file.notes.push_back("field \"" + field + "\" is kept and not used (first at " + where +
                         "): only a prompt of messages has a chat template");
  return std::move(file);
}

}  // namespace

PromptFile read_prompts(const std::string& path, std::int64_t vocabulary, LazyTokenizer& tokenizer, Progress& progress,
                        const std::string& columns) {
  std::int64_t total = 0;
  auto stream = open_file_bytes(path, total);
  const bool parquet = is_parquet(path);
  progress.begin("reading prompts", parquet ? 0 : total, "bytes");
  const auto advance = [&](std::int64_t done) { progress.advance_to(done); };
  if (parquet)
    stream = std::make_unique<PythonRecords>(
        path, [&] { progress.advance_to(0); }, std::vector<std::string>{"espalier.texts", "prompts"});
  else
    stream = unpacked(std::move(stream), path);
  return read_all(*stream, path, vocabulary, tokenizer, progress, columns, advance);
}

PromptFile parse_prompts(std::string_view text, const std::string& name, std::int64_t vocabulary,
                         LazyTokenizer& tokenizer, const std::string& columns) {
  NoProgress silent;
  const auto stream = unpacked(memory_bytes(text), name);
  return read_all(*stream, name, vocabulary, tokenizer, silent, columns, {});
}

}  // namespace espalier
