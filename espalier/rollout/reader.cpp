#include "espalier/rollout/reader.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "espalier/rollout/line_reader.h"
#include "espalier/rollout/record_format.h"

namespace espalier {
namespace {

constexpr std::string_view kKnownFields[] = {
    "prompt_ids",       "response_ids", "group",   "loss_mask",   "reward", "advantage", "old_logprobs", "ref_logprobs",
    "rollout_logprobs", "values",       "returns", "temperature", "step",   "id",        "meta"};

// Edits (insert, delete, replace) that turn a into b.
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i);
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row[b.size()];
}

std::string unknown_field_note(const std::string& field, const std::string& where) {
  std::string note = "unknown field \"" + field + "\" is kept and not used (first at " + where + ")";
  if (field.size() > 40) return note;
  for (const std::string_view known : kKnownFields)
    if (known.size() > 3 && edit_distance(field, known) <= 2) note += "; did you mean \"" + std::string(known) + "\"?";
  return note;
}

// Four MiB, less for small inputs (packed text grows by less than eight times).
std::size_t block_bytes(std::int64_t total) {
  constexpr std::int64_t kLeast = 4 << 10, kMost = 4 << 20;
  return static_cast<std::size_t>(total > 0 && total < kMost / 8 ? std::max(8 * total, kLeast) : kMost);
}

class FileSetReader {
 public:
  FileSetReader(RolloutFile& out, const ReadOptions& options) : out_(out), options_(options) {
    if (options.vocabulary < 0) throw OptionError({"vocabulary", "at least 0", std::to_string(options.vocabulary), ""});
    reader_.vocabulary = options.vocabulary;
  }

  // Appends the records of one file; `total` bytes of all files, for the progress.
  void read(std::unique_ptr<ByteStream> stream, const std::string& name, std::int64_t total) {
    const std::int64_t bytes_before = out_.bytes;
    const std::size_t rollouts_before = out_.rollouts.size();
    stream = unpacked(std::move(stream), name);
    const auto refilled = [&](std::int64_t done) {
      out_.bytes = bytes_before + done;
      if (options_.progress) options_.progress(out_.bytes, total);
    };
    LineReader lines(*stream, name, refilled, block_bytes(total));
    const std::optional<std::int64_t> step = step_of_nemo_rl_name(name);
    std::optional<RecordFormat> format;
    for (Line line; lines.next(line);) {
      const RecordPlace place{name, line.number, line.ends_file};
      if (!format) {
        refuse_other_file_types(name, line.text);
        format = detect_format(reader_, line.text, place);
        note_format(*format);
      }
      Rollout rollout = *format == RecordFormat::neutral ? read_neutral_record(reader_, line.text, place)
                                                         : read_nemo_rl_record(reader_, line.text, place, step);
      rollout.index = static_cast<std::int64_t>(out_.rollouts.size());
      rollout.where = place.where();
      out_.rollouts.push_back(std::move(rollout));
    }
    if (out_.rollouts.size() == rollouts_before)
      throw InputError({name, "at least one rollout", out_.bytes == bytes_before ? "an empty file" : "blank lines only",
                        "Was it written completely?"});
  }

  void finish() {
    for (const auto& [field, where] : reader_.unknown_fields) out_.notes.push_back(unknown_field_note(field, where));
  }

 private:
  void note_format(RecordFormat format) {
    const std::string name = name_of(format);
    if (out_.format.find(name) != std::string::npos) return;
    out_.format += (out_.format.empty() ? "" : " and ") + name;
    if (format == RecordFormat::nemo_rl)
      out_.notes.push_back(
          "NeMo-RL train data: a prompt ends before the first token with loss, equal prompts form a "
          "group, temperature is taken as 1");
  }

  RolloutFile& out_;
  const ReadOptions& options_;
  RecordReader reader_;
};

}  // namespace

RolloutFile read_rollouts(const std::vector<std::string>& paths, const ReadOptions& options) {
  if (paths.empty()) throw OptionError({"rollouts", "at least one file", "none", ""});
  RolloutFile out;
  FileSetReader files(out, options);
  std::int64_t total = 0;
  for (const std::string& path : paths) {  // also: a missing last file is told before the first is read
    std::int64_t bytes = 0;
    open_file_bytes(path, bytes);
    refuse_other_file_types(path, {});
    total += bytes;
  }
  for (const std::string& path : paths) {
    std::int64_t bytes = 0;
    files.read(open_file_bytes(path, bytes), path, total);
  }
  files.finish();
  return out;
}

RolloutFile parse_rollouts(std::string_view text, const std::string& name, const ReadOptions& options) {
  RolloutFile out;
  FileSetReader files(out, options);
  files.read(memory_bytes(text), name, static_cast<std::int64_t>(text.size()));
  files.finish();
  return out;
}

}  // namespace espalier
