#include "espalier/rollout/record_source.h"

#include <simdjson.h>

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

constexpr const char* kArray = "Write one record per line: jq -c '.[]' FILE > FILE.jsonl";
constexpr const char* kTable =
    "Tables of completions hold text and no token ids: write neutral JSON Lines (docs/rollout_format.md) where tokens "
    "are "
    "known";
constexpr const char* kLines = "JSON Lines (.jsonl, .jsonl.gz, .jsonl.zst)";
constexpr const char* kWhole =
    "Was it copied or unpacked completely? Dumps of torch, pickle or Parquet are recognised by their first bytes";
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
  if (start.starts_with("PAR1")) return "a Parquet file";
  const bool pickle = start.size() > 1 && start[0] == '\x80' && start[1] >= 2 && start[1] <= 5;
  return pickle ? "a pickle file" : nullptr;
}

const char* refused_type_of(const std::string& path) {
  if (ends_with_any(path, {".npy", ".npz", ".arrow", ".msgpack"})) return "a binary file";
  return nullptr;
}

// "binary data", from the first line: bytes that no text has; null: perhaps text.
const char* data_type_of(std::string_view line) {
  const bool control = std::ranges::any_of(
      line, [](char c) { return (static_cast<unsigned char>(c) < 0x20 && c != '\t' && c != '\r') || c == '\x7f'; });
  return control || !simdjson::validate_utf8(line) ? "binary data (bytes that are not UTF-8 text)" : nullptr;
}

// "a CSV table", from the first line of a text; null: perhaps records.
const char* table_type_of(const std::string& path, std::string_view line) {
  if (path.ends_with(".csv") || path.ends_with(".tsv")) return "a CSV table";
  if (line.starts_with("\xe2\x94") || line.starts_with("\xe2\x95"))  // box drawing, U+2500 to U+257F
    return "a printed table (TRL prints its completions so)";
  const bool json = line.empty() || line.find_first_of("{[") != line.npos;
  return !json && line.find_first_of(",\t") != line.npos ? "a CSV table" : nullptr;
}

// The name in lower case, without the ending of a packed file.
std::string bare_name(const std::string& path) {
  std::string name = lower_case(path);
  for (const std::string_view packed : {".gz", ".zst"})
    if (name.ends_with(packed)) return name.substr(0, name.size() - packed.size());
  return name;
}

bool named_for_python(const std::string& path) {
  return ends_with_any(bare_name(path), {".pt", ".pth", ".pkl", ".pickle", ".safetensors", ".parquet"});
}

bool named_lines(const std::string& path) {
  return ends_with_any(lower_case(path), {".jsonl", ".jsonl.gz", ".jsonl.zst"});
}

// "part2" before "part10": runs of digits are compared as numbers.
bool before(std::string_view a, std::string_view b) {
  const auto digits = [](std::string_view text) { return std::min(text.find_first_not_of("0123456789"), text.size()); };
  while (!a.empty() && !b.empty()) {
    const std::size_t in_a = digits(a), in_b = digits(b);
    if (in_a > 0 && in_b > 0) {
      std::string_view x = a.substr(0, in_a), y = b.substr(0, in_b);
      x.remove_prefix(std::min(x.find_first_not_of('0'), x.size()));
      y.remove_prefix(std::min(y.find_first_not_of('0'), y.size()));
      if (x.size() != y.size()) return x.size() < y.size();
      if (x != y) return x < y;
      a.remove_prefix(in_a), b.remove_prefix(in_b);
      continue;
    }
    if (a.front() != b.front()) return a.front() < b.front();
    a.remove_prefix(1), b.remove_prefix(1);
  }
  return a.size() < b.size();
}

// Unpacked where the file is packed; empty where it is damaged, which its reader tells.
std::string first_bytes(const std::string& path) {
  std::array<char, 8> start{};
  std::int64_t bytes = 0;
  try {
    const std::size_t got = unpacked(open_file_bytes(path, bytes), path)->read(start.data(), start.size());
    return std::string(start.data(), got);
  } catch (const InputError&) {
    return "";
  }
}

void add_file(const std::string& path, std::vector<RecordSource>& out) {
  std::int64_t bytes = 0;
  open_file_bytes(path, bytes);
  std::error_code error;
  const bool regular = fs::is_regular_file(path, error);  // looking into a pipe would take its first bytes away
  const std::string start = regular ? first_bytes(path) : std::string();
  if (const char* const type = refused_type_of(lower_case(path)))
    throw UnsupportedError({path, std::string(kLines) + " or a dump of docs/rollout_format.md", type, kNeverRead});
  const bool by_python = regular && (python_type_of(start) != nullptr || named_for_python(path));
  out.push_back({path, by_python, bytes});
}

// The folder of a trial of Harbor.
bool holds_a_trial(const fs::directory_entry& entry) {
  std::error_code error;
  return entry.is_directory(error) && fs::is_regular_file(entry.path() / "result.json", error);
}

// A folder in which slime's --dump-details keeps its dumps.
bool holds_dumps_of_slime(const fs::directory_entry& entry) {
  const std::string name = entry.path().filename().string();
  std::error_code error;
  if ((name != "rollout_data" && name != "train_data") || !entry.is_directory(error)) return false;
  return std::any_of(fs::directory_iterator(entry.path(), error), fs::directory_iterator(),
                     [](const fs::directory_entry& dump) { return named_for_python(dump.path().string()); });
}

void add_folder(const std::string& path, std::vector<RecordSource>& out) {
  std::vector<std::pair<std::int64_t, std::string>> steps;
  std::vector<std::string> lines;
  bool for_python = false, json = false;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(path, error)) {
    const std::string name = entry.path().string();
    if (const std::optional<std::int64_t> step = step_of_nemo_rl_name(name))
      steps.emplace_back(*step, name);
    else if (named_lines(name) && !entry.path().filename().string().starts_with('.'))
      lines.push_back(name);
    for_python = for_python || named_for_python(name) || holds_dumps_of_slime(entry) || holds_a_trial(entry);
    json = json || bare_name(name).ends_with(".json");
  }
  for_python = for_python || (json && steps.empty() && lines.empty());
  if (steps.empty() && lines.empty() && !for_python)
    throw InputError({path, "a file of rollouts, or a folder of them", "a directory without any",
                      "Give .jsonl files, or a directory that contains some"});
  if (!lines.empty() && (for_python || !steps.empty()))
    throw InputError(
        {path, "a folder of rollouts of one kind", "several", "Give the files in it, such as DIR/*.jsonl"});
  if (steps.empty() && for_python) return out.push_back({path, true, 0});
  std::sort(steps.begin(), steps.end());
  std::sort(lines.begin(), lines.end(), before);
  for (const auto& [step, name] : steps) add_file(name, out);
  for (const std::string& name : lines) add_file(name, out);
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
  if (const char* const type = python_type_of(first_line)) throw UnsupportedError({name, kLines, type, kByPath});
  if (const char* const type = first_line.find('{') == 0 ? nullptr : data_type_of(first_line))
    throw UnsupportedError({name, kLines, type, kWhole});
  if (const char* const type = table_type_of(lower_case(name), first_line))
    throw UnsupportedError({name, kLines, type, kTable});
  const std::size_t begin = std::min(first_line.find_first_not_of(" \t\r"), first_line.size());
  const std::string_view text = first_line.substr(begin);
  if (text == "[" || text.starts_with("[{")) throw UnsupportedError({name, kLines, "a JSON array of records", kArray});
}

}  // namespace espalier
