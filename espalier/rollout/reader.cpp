#include "espalier/rollout/reader.h"

#include <algorithm>
#include <filesystem>

#include "espalier/options/column_names.h"
#include "espalier/options/nearest_option.h"
#include "espalier/rollout/line_reader.h"
#include "espalier/rollout/python_records.h"
#include "espalier/rollout/record_format.h"
#include "espalier/rollout/record_source.h"

namespace espalier {
namespace {

constexpr const char* kNemoNote =
    "NeMo-RL train data: prompts end before the first token with loss, equal prompts form a group, the temperature is "
    "not in it (--temperature, by default 1)";

std::string unknown_field_note(const std::string& field, const std::string& where) {
  const std::string note = "unknown field \"" + field + "\" is kept and not used (first at " + where + ")";
  std::vector<std::string> known;
  for (const std::string_view name : neutral_fields())
    if (name.size() > 3) known.emplace_back(name);  // a shorter one is near to anything short
  const std::string nearest = nearest_name(field, known);
  return nearest.empty() ? note : note + "; did you mean \"" + nearest + "\"?";
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
    reader_.temperature = options.temperature;
  }

  // Appends the records of one file; `total` bytes of all files, for the progress.
  void read(std::unique_ptr<ByteStream> stream, const std::string& name, std::int64_t total) {
    stream = unpacked(std::move(stream), name);
    read_lines(*stream, name, total, false);
  }

  // Appends the records of a file or folder that Python reads.
  void read_by_python(const std::string& path) {
    const std::string& model = options_.retokenizing_model;
    std::vector<std::string> reader = {"espalier.records", "--"};
    if (!model.empty()) reader = {"espalier.texts", "retokenize", model};
    read_by_python(path, std::move(reader));
  }

  void read_by_python(const std::string& path, std::vector<std::string> reader) {
    const auto waiting = [&] {
      if (options_.progress) options_.progress(out_.bytes, 0);
    };
    PythonRecords stream(path, waiting, reader);
    read_lines(stream, path, 0, true);
    note_format(stream.format());
    out_.notes.insert(out_.notes.end(), stream.notes().begin(), stream.notes().end());
  }

  // Appends the records that the rows of text in a file stand for.
  void read_rows(const std::string& path) {
    if (options_.rows.model.empty())
      throw InputError({path, "--model DIR, whose tokenizer turns the text into token ids", "none", "give --model"});
    column_names(options_.rows.columns, {"prompt", "chosen", "rejected", "answers", "completion", "messages", "text",
                                         "tools", "chat_template_kwargs", "group", "step", "id", "temperature",
                                         "margin", "ref_chosen_logps", "ref_rejected_logps"});
    read_by_python(path,
                   {"espalier.texts", "rows", options_.rows.objective, options_.rows.model, options_.rows.columns});
  }

  // True where the first record of the file is text that `rows` makes records of.
  bool holds_rows(const RecordSource& source) {
    if (options_.rows.objective.empty() || source.path == "-") return false;
    if (source.path.ends_with(".parquet")) return true;
    return with_first_line(source, [&](const Line& line, const RecordPlace& place) {
      refuse_binary(source.path, line.text);
      return !options_.rows.columns.empty() || is_text_row(reader_, line.text, place);
    });
  }

  // True where the file holds traces of agents, or one JSON value over several lines: Python reads both.
  bool holds_traces(const RecordSource& source) {
    const bool json = source.path.ends_with(".json") || source.path.ends_with(".json.gz");
    return with_first_line(source, [&](const Line& line, const RecordPlace& place) {
      try {
        return is_trace(reader_, line.text, place);
      } catch (const InputError&) {
        return json && line.text.find_first_of("{[") == line.text.find_first_not_of(" \t\r");
      }
    });
  }

  void finish() {
    for (const auto& [field, where] : reader_.unknown_fields) out_.notes.push_back(unknown_field_note(field, where));
    if (reader_.unsampled_tokens > 0)
      out_.notes.push_back(text_of("rollout_logprobs of ", reader_.unsampled_tokens,
                                   " tokens with loss are not finite: they count as not recorded, with importance "
                                   "weight 1"));
  }

 private:
  // visit(line, place) of the first line of a file that is no pipe and not for Python alone; false where there is none.
  template <class Visit>
  bool with_first_line(const RecordSource& source, const Visit& visit) {
    std::error_code ignored;
    if (source.by_python || source.path == "-" || !std::filesystem::is_regular_file(source.path, ignored)) return false;
    std::int64_t bytes = 0;
    const std::unique_ptr<ByteStream> stream = unpacked(open_file_bytes(source.path, bytes), source.path);
    LineReader lines(*stream, source.path, [](std::int64_t) {});
    Line line;
    return lines.next(line) && visit(line, RecordPlace{source.path, line.number, line.ends_file});
  }

  void read_lines(ByteStream& stream, const std::string& name, std::int64_t total, bool by_python) {
    const std::int64_t bytes_before = out_.bytes;
    const std::size_t rollouts_before = out_.rollouts.size();
    const auto refilled = [&](std::int64_t done) {
      out_.bytes = bytes_before + done;
      if (options_.progress) options_.progress(out_.bytes, total);
    };
    LineReader lines(stream, name, refilled, block_bytes(total));
    const std::optional<std::int64_t> step = step_of_nemo_rl_name(name);
    std::optional<RecordFormat> format;
    if (by_python) format = RecordFormat::neutral;
    for (Line line; lines.next(line);) {
      const RecordPlace place{name, line.number, line.ends_file};
      if (!format) {
        refuse_binary(name, line.text);
        format = detect_format(reader_, line.text, place);
        note_format(name_of(*format));
        if (*format == RecordFormat::nemo_rl && !nemo_noted_) out_.notes.push_back(kNemoNote);
        nemo_noted_ = nemo_noted_ || *format == RecordFormat::nemo_rl;
      }
      const std::size_t before = out_.rollouts.size();
      if (*format == RecordFormat::neutral)
        read_neutral_record(reader_, line.text, place, out_.rollouts);
      else
        out_.rollouts.push_back(read_nemo_rl_record(reader_, line.text, place, step));
      for (std::size_t i = before; i < out_.rollouts.size(); ++i) {
        out_.rollouts[i].index = static_cast<std::int64_t>(i);
        out_.rollouts[i].where = place.where();
      }
    }
    if (out_.rollouts.size() == rollouts_before)
      throw InputError({name, "at least one rollout", out_.bytes == bytes_before ? "an empty file" : "blank lines only",
                        "Was it written completely?"});
  }

  void note_format(const std::string& name) {
    if (out_.format.find(name) == std::string::npos) out_.format += (out_.format.empty() ? "" : " and ") + name;
  }

  RolloutFile& out_;
  const ReadOptions& options_;
  RecordReader reader_;
  bool nemo_noted_ = false;
};

}  // namespace

RolloutFile read_rollouts(const std::vector<std::string>& paths, const ReadOptions& options) {
  if (paths.empty()) throw OptionError({"rollouts", "at least one file", "none", ""});
  RolloutFile out;
  FileSetReader files(out, options);
  const std::vector<RecordSource> sources = record_sources(paths);  // also: all are there before the first is read
  std::int64_t total = 0;
  bool known = true;
  const bool texts = !options.retokenizing_model.empty();
  for (const RecordSource& source : sources) total += source.bytes, known = known && !source.by_python && !texts;
  for (const RecordSource& source : sources) {
    std::int64_t bytes = 0;
    if (files.holds_rows(source))
      files.read_rows(source.path);
    else if (source.by_python || texts || files.holds_traces(source))
      files.read_by_python(source.path);
    else
      files.read(open_file_bytes(source.path, bytes), source.path, known ? total : 0);
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
