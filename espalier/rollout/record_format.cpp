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

using Keys = std::set<std::string, std::less<>>;

Keys keys_of(RecordReader& reader, std::string_view line, const RecordPlace& place) {
  Keys keys;
  for_each_member(reader.parser, line, place, [&](std::string_view key, JsonValue) { keys.emplace(key); });
  return keys;
}

// Fields by which python/espalier/records recognises traces.
bool of_trace(const Keys& keys) {
  if (keys.contains("prompt_ids") || keys.contains("response_ids") || keys.contains("token_ids")) return false;
  return keys.contains("trajectories") || keys.contains("responses_create_params") ||
         (keys.contains("traces") && keys.contains("env")) ||
         (keys.contains("trial_name") && keys.contains("agent_result")) ||
         (keys.contains("schema_version") && keys.contains("steps"));
}

}  // namespace

const char* name_of(RecordFormat format) {
  return format == RecordFormat::neutral ? "neutral JSON Lines" : "NeMo-RL train data";
}

RecordFormat detect_format(RecordReader& reader, std::string_view line, const RecordPlace& place) {
  const Keys keys = keys_of(reader, line, place);
  if (keys.contains("prompt_ids") || keys.contains("response_ids")) return RecordFormat::neutral;
  if (of_trace(keys))
    throw UnsupportedError({place.where(), "records with prompt_ids and response_ids", "an agent's trace",
                            "Save it as a file and give its path: it is read by the Python package"});
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

bool is_trace(RecordReader& reader, std::string_view line, const RecordPlace& place) {
  return of_trace(keys_of(reader, line, place));
}

bool is_text_row(RecordReader& reader, std::string_view line, const RecordPlace& place) {
  bool ids = false;
  for_each_member(reader.parser, line, place,
                  [&](std::string_view key, JsonValue) { ids = ids || key.ends_with("_ids"); });
  return !ids;
}

}  // namespace espalier
