// The sources behind the paths that a user names: files read here, files and folders that the Python package reads.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace espalier {

struct RecordSource {
  std::string path;
  bool by_python = false;
  std::int64_t bytes = 0;  // on disk; 0: not known (a folder, a pipe)
};

// In the order to read: a folder of NeMo-RL's train_data_step*.jsonl becomes its files by step, any other its .jsonl
// files (.gz, .zst) by name, numbers in names as numbers; "-" is standard input. Python reads pickles, torch files,
// safetensors, Parquet and folders with such files. Errors: InputError for what is absent, unreadable, or a folder of
// nothing or of several kinds; UnsupportedError for file types that are never read.
std::vector<RecordSource> record_sources(const std::vector<std::string>& paths);

// For text whose file cannot be chosen by its path (a pipe, memory). UnsupportedError where `first_line` begins a file
// that is no text.
void refuse_binary(const std::string& name, std::string_view first_line);

}  // namespace espalier
