#include "espalier/rollout/record_format.h"

#include <algorithm>
#include <array>
#include <set>

#include "espalier/rollout/json_text.h"

namespace espalier {
namespace {

constexpr const char* kPython = "Read by the Python package: espalier.convert(...) writes the neutral format from it";

struct TextDump {
  std::array<std::string_view, 2> fields;  // a record with these and without token ids is such a dump
  std::string_view writer;
};

constexpr std::array<TextDump, 8> kTextDumps = {{
    {{"input", "output"}, "verl's rollout dump (trainer.rollout_data_dir)"},
    {{"prompt", "completion"}, "a table of completions as TRL and AReaL write it"},
    {{"prompt", "completions"}, "a table of completions as TRL writes it"},
    {{"prompt", "responses"}, "ROLL's rollout dump (rollout_dump_dir)"},
    {{"prompt", "response"}, "a prompt/response dump"},
    {{"content", "input_lengths"}, "train data of a NeMo-RL version that does not log token_ids"},
    {{"messages", "messages"}, "a dump of chat messages"},
    {{"question", "answer"}, "a data set of questions and answers"},
}};

bool ends_with_any(std::string_view name, std::initializer_list<std::string_view> endings) {
  return std::any_of(endings.begin(), endings.end(), [&](std::string_view ending) { return name.ends_with(ending); });
}

}  // namespace

const char* name_of(RecordFormat format) {
  return format == RecordFormat::neutral ? "neutral JSON Lines" : "NeMo-RL train data";
}

void refuse_other_file_types(const std::string& path, std::string_view first_line) {
  std::string lower = path;
  for (char& c : lower) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  const char* found = nullptr;
  if (ends_with_any(lower, {".pkl", ".pickle"}) || first_line.starts_with("\x80\x02") ||
      first_line.starts_with("\x80\x03") || first_line.starts_with("\x80\x04") || first_line.starts_with("\x80\x05"))
    found = "a pickle file";
  else if (ends_with_any(lower, {".pt", ".pth"}) || first_line.starts_with("PK\x03\x04"))
    found = "a torch file";
  else if (ends_with_any(lower, {".parquet"}) || first_line.starts_with("PAR1"))
    found = "a Parquet file";
  else if (ends_with_any(lower, {".safetensors"}))
    found = "a safetensors file";
  else if (ends_with_any(lower, {".npy", ".npz", ".arrow", ".msgpack"}))
    found = "a binary file";
  if (found != nullptr) throw UnsupportedError({path, "JSON Lines (.jsonl, .jsonl.gz)", found, kPython});
}

RecordFormat detect_format(RecordReader& reader, std::string_view line, const RecordPlace& place) {
  std::set<std::string, std::less<>> keys;
  for_each_member(reader.parser, line, place, [&](std::string_view key, JsonValue) { keys.emplace(key); });
  if (keys.contains("prompt_ids") || keys.contains("response_ids")) return RecordFormat::neutral;
  const bool from_nemo =
      keys.contains("input_lengths") || keys.contains("token_loss_mask") || keys.contains("generation_logprobs");
  if (keys.contains("token_ids") && from_nemo) return RecordFormat::nemo_rl;
  for (const TextDump& dump : kTextDumps)
    if (keys.contains(dump.fields[0]) && keys.contains(dump.fields[1]))
      throw UnsupportedError({place.where(), "token ids (prompt_ids, response_ids)",
                              text_of("text only: ", dump.writer),
                              "Text does not tell which tokens were sampled: tokenizing it again gives other tokens "
                              "and no log-probs. Record token ids, for example in the neutral format"});
  return RecordFormat::neutral;
}

void add_carried(std::string& carried, std::string_view key, std::string_view raw_value) {
  if (carried.empty())
    carried = "{";
  else
    carried.back() = ',';
  carried.append(json_quoted(key)).append(":").append(raw_value).append("}");
}

}  // namespace espalier
