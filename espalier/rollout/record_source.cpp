#include "espalier/rollout/record_source.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <optional>
#include <utility>

#include "espalier/base/error.h"
#include "espalier/rollout/byte_stream.h"
#include "espalier/rollout/record_format.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;

constexpr const char* kArray = "Write one record a line: jq -c '.[]' FILE > FILE.jsonl";
constexpr const char* kTable =
    "Tables of completions hold text and no token ids: write neutral JSON Lines (docs/rollout_format.md) where tokens "
    "are "
    "known";
constexpr const char* kByPath = "Save it as a file and give its path: it is read by the Python package";
constexpr const char* kNeverRead =
    "Write neutral JSON Lines from it (docs/rollout_format.md); tables of completions hold text and no token ids";

std::string lower_case(std::string text) {
  for (char& c : text) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  return text;
}

bool ends_with_any(std::string_view name, std::initializer_list<std::string_view> endings) {
  return std::any_of(endings.begin(), endings.end(), [&](std::string_view ending) { return name.ends_with(ending); });
}

// "a pickle file", from the first bytes; null: perhaps text.
const char* python_type_of(std::string_view start) {
  if (start.starts_with("PK\x03\x04")) return "a torch file";
  const bool pickle = start.size() > 1 && start[0] == '\x80' && start[1] >= 2 && start[1] <= 5;
  return pickle ? "a pickle file" : nullptr;
}

const char* refused_type_of(const std::string& path, std::string_view start) {
  if (path.ends_with(".parquet") || start.starts_with("PAR1")) return "a Parquet file";
  if (ends_with_any(path, {".npy", ".npz", ".arrow", ".msgpack"})) return "a binary file";
  return nullptr;
}

// "a CSV table", from the first line of a text; null: perhaps records.
const char* table_type_of(const std::string& path, std::string_view line) {
  if (path.ends_with(".csv") || path.ends_with(".tsv")) return "a CSV table";
  if (line.starts_with("\xe2\x94") || line.starts_with("\xe2\x95"))  // box drawing, U+2500 to U+257F
    return "a printed table (TRL prints its completions so)";
  const bool json = line.empty() || line.find_first_of("{[") != line.npos;
  return !json && line.find_first_of(",\t") != line.npos ? "a CSV table" : nullptr;
}

bool named_for_python(const std::string& path) {
  return ends_with_any(lower_case(path), {".pt", ".pth", ".pkl", ".pickle", ".safetensors"});
}

std::string first_bytes(const std::string& path) {
  std::array<char, 8> start{};
  std::int64_t bytes = 0;
  const std::size_t got = open_file_bytes(path, bytes)->read(start.data(), start.size());
  return std::string(start.data(), got);
}

void add_file(const std::string& path, std::vector<RecordSource>& out) {
  std::int64_t bytes = 0;
  open_file_bytes(path, bytes);
  std::error_code error;
  const bool regular = fs::is_regular_file(path, error);  // looking into a pipe would take its first bytes away
  const std::string start = regular ? first_bytes(path) : std::string();
  if (const char* const type = refused_type_of(lower_case(path), start))
    throw UnsupportedError(
        {path, "JSON Lines (.jsonl, .jsonl.gz) or a dump of docs/rollout_format.md", type, kNeverRead});
  const bool by_python = regular && (python_type_of(start) != nullptr || named_for_python(path));
  out.push_back({path, by_python, bytes});
}

void add_folder(const std::string& path, std::vector<RecordSource>& out) {
  std::vector<std::pair<std::int64_t, std::string>> steps;
  bool for_python = false;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(path, error)) {
    const std::string name = entry.path().string();
    if (const std::optional<std::int64_t> step = step_of_nemo_rl_name(name)) steps.emplace_back(*step, name);
    for_python = for_python || named_for_python(name);
  }
  if (steps.empty() && !for_python)
    throw InputError({path, "a file of rollouts, or a folder of dumps", "a directory without any",
                      "Name the files in it, such as DIR/*.jsonl"});
  if (steps.empty()) return out.push_back({path, true, 0});
  std::sort(steps.begin(), steps.end());
  for (const auto& [step, name] : steps) add_file(name, out);
}

}  // namespace

std::vector<RecordSource> record_sources(const std::vector<std::string>& paths) {
  std::vector<RecordSource> out;
  std::error_code error;
  for (const std::string& path : paths) {
    if (fs::is_directory(path, error))
      add_folder(path, out);
    else
      add_file(path, out);
  }
  return out;
}

void refuse_binary(const std::string& name, std::string_view first_line) {
  if (const char* const type = python_type_of(first_line))
    throw UnsupportedError({name, "JSON Lines (.jsonl, .jsonl.gz)", type, kByPath});
  if (const char* const type = refused_type_of(name, first_line))
    throw UnsupportedError({name, "JSON Lines (.jsonl, .jsonl.gz)", type, kNeverRead});
  if (const char* const type = table_type_of(lower_case(name), first_line))
    throw UnsupportedError({name, "JSON Lines (.jsonl, .jsonl.gz)", type, kTable});
  const std::size_t begin = std::min(first_line.find_first_not_of(" \t\r"), first_line.size());
  const std::string_view text = first_line.substr(begin);
  if (text == "[" || text.starts_with("[{"))
    throw UnsupportedError({name, "JSON Lines (.jsonl, .jsonl.gz)", "a JSON array of records", kArray});
}

}  // namespace espalier
