// The format of a file of records, detected from its first one, and the readers of the two formats.
#pragma once

#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "espalier/rollout/record_fields.h"
#include "espalier/rollout/rollout.h"

namespace espalier {

enum class RecordFormat { neutral, nemo_rl };
const char* name_of(RecordFormat format);

// State that lasts over the records of a read.
struct RecordReader {
  simdjson::ondemand::parser parser;
  std::int64_t vocabulary = 0;                        // 0: not checked
  double temperature = 1;                             // of records without one
  std::map<std::string, std::string> unknown_fields;  // of neutral records: name -> where it first occurred
  std::int64_t pairs = 0;                             // pairs and lists of answers read so far
  std::int64_t unsampled_tokens = 0;                  // tokens with loss whose rollout_logprobs are not recorded
};

// From the fields of a file's first record; neutral if no other format is recognised. Errors: UnsupportedError naming
// the writer of a text-only dump; InputError for a line that is not a JSON object.
RecordFormat detect_format(RecordReader& reader, std::string_view line, const RecordPlace& place);

// True for a record of an agent's trace, which the Python package reads: an episode of rLLM, of verifiers or prime-rl,
// a row of NeMo Gym, a trial of Harbor. Errors: InputError for a line that is not a JSON object.
bool is_trace(RecordReader& reader, std::string_view line, const RecordPlace& place);

// True for a row of a data set of text: pairs (chosen), scored answers (answers), or answers (completion, messages,
// conversations, text). False for a record with a field whose name ends in _ids. Errors: InputError for a line that is
// not a JSON object.
bool is_text_row(RecordReader& reader, std::string_view line, const RecordPlace& place);

// The names of the fields that a neutral record may have (docs/rollout_format.md).
std::span<const std::string_view> neutral_fields();
// Appends the rollouts of one record of the neutral format: one, the two of a pair, or one for each answer of a list.
// The caller sets `index` and `where`.
void read_neutral_record(RecordReader& reader, std::string_view line, const RecordPlace& place,
                         std::vector<Rollout>& out);

// The rollout of one record of NeMo-RL's train_data_step*.jsonl (nemo_rl_record.cpp). `step`: from the file's name.
Rollout read_nemo_rl_record(RecordReader& reader, std::string_view line, const RecordPlace& place,
                            std::optional<std::int64_t> step);

// 17 for ".../train_data_step17.jsonl" and ".jsonl.gz"; none for other names.
std::optional<std::int64_t> step_of_nemo_rl_name(const std::string& path);

}  // namespace espalier
