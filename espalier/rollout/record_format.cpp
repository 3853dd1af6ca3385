#include "espalier/rollout/record_format.h"

#include <array>
#include <set>

#include "espalier/rollout/json_text.h"

namespace espalier {
namespace {

struct TextDump {
  std::array<std::string_view, 2> fields;  // a record with these and without token ids is such a dump
  std::string_view writer;
};

constexpr std::array<TextDump, 9> kTextDumps = {{
    {{"chosen", "rejected"}, "a table of preference pairs; the fields here are prompt_ids, chosen_ids, rejected_ids"},
    {{"input", "output"}, "verl's rollout dump (trainer.rollout_data_dir)"},
    {{"prompt", "completion"}, "a table of completions as TRL and AReaL write it"},
    {{"prompt", "completions"}, "a table of completions as TRL writes it"},
    {{"prompt", "responses"}, "ROLL's rollout dump (rollout_dump_dir)"},
    {{"prompt", "response"}, "a prompt/response dump"},
    {{"content", "input_lengths"}, "train data of a NeMo-RL version that does not log token_ids"},
    {{"messages", "messages"}, "a dump of chat messages"},
    {{"question", "answer"}, "a data set of questions and answers"},
}};

}  // namespace

const char* name_of(RecordFormat format) {
  return format == RecordFormat::neutral ? "neutral JSON Lines" : "NeMo-RL train data";
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
      throw UnsupportedError(
          {place.where(), "token ids (prompt_ids, response_ids)", text_of("text only: ", dump.writer),
           "Text does not tell which tokens were sampled: tokenizing it again gives other tokens "
           "and no log-probs. Record token ids, for example in the neutral format, or accept the difference: "
           "espalier convert --retokenize --model MODEL IN OUT"});
  return RecordFormat::neutral;
}

bool is_text_row(RecordReader& reader, std::string_view line, const RecordPlace& place) {
  bool ids = false, text = false;
  for_each_member(reader.parser, line, place, [&](std::string_view key, JsonValue) {
    ids = ids || key.ends_with("_ids");
    for (const std::string_view name : {"chosen", "answers", "completion", "messages", "conversations", "text"})
      text = text || key == name;
  });
  return text && !ids;
}

}  // namespace espalier
