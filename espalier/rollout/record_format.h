// Which format a file of lines holds, from its first record, and the two record readers.
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
  double temperature = 1;                             // of records that do not say theirs
  std::map<std::string, std::string> unknown_fields;  // name -> where it first stood
  std::int64_t pairs = 0;                             // read so far
};

// From the fields of a file's first record. UnsupportedError for text-only dumps, by the name of their writer.
RecordFormat detect_format(RecordReader& reader, std::string_view line, const RecordPlace& place);

// True for a row of a data set of text: it has chosen, answers, completion, messages, conversations or text, and no
// field ..._ids. InputError for what is no JSON object.
bool is_text_row(RecordReader& reader, std::string_view line, const RecordPlace& place);

// The names of the fields that a neutral record may have (docs/rollout_format.md).
std::span<const std::string_view> neutral_fields();
// Appends one record of the neutral format: a rollout, the two of a pair, or the answers of a list. The caller sets
// `index` and `where`.
void read_neutral_record(RecordReader& reader, std::string_view line, const RecordPlace& place,
                         std::vector<Rollout>& out);

// One record of NeMo-RL's train_data_step*.jsonl, see nemo_rl_record.cpp. `step`: from the file's name.
Rollout read_nemo_rl_record(RecordReader& reader, std::string_view line, const RecordPlace& place,
                            std::optional<std::int64_t> step);

// 17 for ".../train_data_step17.jsonl" and ".jsonl.gz"; none for other names.
std::optional<std::int64_t> step_of_nemo_rl_name(const std::string& path);

// Adds a member to the JSON object text `carried` (empty: none yet).
void add_carried(std::string& carried, std::string_view key, std::string_view raw_value);

}  // namespace espalier
