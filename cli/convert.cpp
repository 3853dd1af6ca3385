// espalier convert IN OUT: any supported format to the neutral one.
#include <filesystem>
#include <span>

#include "cli/reading.h"
#include "cli/verbs.h"
#include "espalier/base/error.h"
#include "espalier/base/units.h"
#include "espalier/options/column_names.h"
#include "espalier/rollout/writer.h"

namespace espalier::cli {
namespace {

// A name that promises another format would mislead the reader of the file. Pipes and devices promise nothing.
void check_name(const std::string& path) {
  const auto ends_in = [&](const std::string& end) {
    return path.size() >= end.size() && path.compare(path.size() - end.size(), end.size(), end) == 0;
  };
  std::error_code error;
  const auto kind = std::filesystem::status(path, error).type();
  const bool device = kind == std::filesystem::file_type::character || kind == std::filesystem::file_type::fifo;
  if (!device && !ends_in(".jsonl") && !ends_in(".jsonl.gz") && !ends_in(".jsonl.zst"))
    throw OptionError({"OUT", "a name that ends in .jsonl, .jsonl.gz or .jsonl.zst", '"' + path + '"', ""});
}

// The model whose tokenizer makes ids of a dump of text; "" without --retokenize.
std::string retokenizing_model(const Options& options) {
  if (options.objective != ObjectiveKind::grpo) {
    if (options.retokenize || options.model.empty())
      throw OptionError({"--objective",
                         "--model, whose tokenizer makes token ids of the rows of text, and no --retokenize",
                         options.retokenize ? "--retokenize" : "no --model",
                         options.retokenize ? "leave one of them out" : "give --model DIR"});
    return {};
  }
  if (options.retokenize == options.model.empty())
    throw OptionError(
        {options.retokenize ? "--retokenize" : "--model", "--retokenize and --model together",
         options.retokenize ? "no --model" : "--model without --retokenize",
         "a dump of text needs both, because the model's tokenizer makes its token ids; other dumps need neither"});
  return options.model;
}

// Records with token ids pass as they are, other rows are text of the objective.
TextRows rows_of(const Options& options) {
  if (options.objective == ObjectiveKind::grpo) {
    require_no_columns(options);
    return {};
  }
  return {name_of(options.objective), options.model, options.columns};
}

// The rollouts of one record: both of a pair, all of a list, or one.
std::span<const Rollout> record_at(std::span<const Rollout> rollouts, std::size_t begin) {
  const std::int64_t set = rollouts[begin].pair.pair;
  std::size_t end = begin + 1;
  while (set >= 0 && end < rollouts.size() && rollouts[end].pair.pair == set) ++end;
  return rollouts.subspan(begin, end - begin);
}

}  // namespace

int run_convert(Context& context) {
  const std::string& in = context.arguments[0];
  const std::string& out = context.arguments[1];
  check_name(out);
  const RolloutFile file = read_for(context, {in}, 0, retokenizing_model(context.options), rows_of(context.options));
  RolloutWriter writer(out);
  context.progress.begin("writing", static_cast<std::int64_t>(file.rollouts.size()), "rollouts");
  std::int64_t written = 0, tokens = 0;
  while (written < static_cast<std::int64_t>(file.rollouts.size())) {
    const std::span<const Rollout> record = record_at(file.rollouts, static_cast<std::size_t>(written));
    writer.write_record(record);
    for (const Rollout& rollout : record) tokens += rollout.length();
    context.progress.advance_to(written += static_cast<std::int64_t>(record.size()));
  }
  writer.finish();
  context.progress.end();
  context.result["rollouts"] = written;
  context.result["tokens"] = tokens;
  context.result["format"] = file.format;
  context.result["out"] = out;
  context.text << format_count(written) << " rollouts, " << format_count(tokens) << " tokens, from " << file.format
               << " to " << out << '\n';
  return 0;
}

}  // namespace espalier::cli
