// Reads recorded rollouts: neutral JSON Lines and NeMo-RL's train_data_step*.jsonl, plain, gzip or zstd, recognised by
// their content; folders of them; standard input ("-"); and the formats of python_records.h through the Python package.
// Files are read in blocks; every value is checked, and one bad value fails the whole read.
//
// Errors: InputError with "file:line", the field, what was expected and found, for anything that breaks the record
// format; UnsupportedError for formats that are known and not read (text-only dumps).
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "espalier/rollout/rollout.h"

namespace espalier {

// Rows of text as TRL's data sets have them become records by a model's tokenizer (python/espalier/texts/rows.py):
// rows of JSON Lines whose first record has no ids, and of Parquet.
struct TextRows {
  std::string objective;  // "dpo", "reward" or "sft"; empty: text is refused
  std::string model;      // directory
  std::string columns;    // --columns: the user's names of columns; not empty: every file of JSON Lines holds such rows
};

struct ReadOptions {
  std::int64_t vocabulary = 0;     // a token id at or above it is an error; 0: not checked
  double temperature = 1;          // of records that do not say theirs
  std::string retokenizing_model;  // not empty: files are dumps of text, and this model directory's tokenizer makes ids
  TextRows rows;
  std::function<void(std::int64_t done_bytes, std::int64_t total_bytes)> progress;  // total 0: not known
};

struct RolloutFile {
  std::vector<Rollout> rollouts;  // in input order, over all files
  std::string format;             // "neutral JSON Lines", "NeMo-RL train data", "slime debug dump" ..., joined by "and"
  std::vector<std::string> notes;  // each unknown field once, and what a format left open
  std::int64_t bytes = 0;          // of the files as they lie on disk; of the records' text where Python read them
};

RolloutFile read_rollouts(const std::vector<std::string>& paths, const ReadOptions& options = {});

// The same for one text in memory (plain, gzip or zstd); `name` stands for the file in messages.
RolloutFile parse_rollouts(std::string_view text, const std::string& name, const ReadOptions& options = {});

}  // namespace espalier
