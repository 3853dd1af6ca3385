#include "cli/reading.h"

namespace espalier::cli {

RolloutFile read_for(Context& context, const std::vector<std::string>& paths, std::int64_t vocabulary,
                     const std::string& retokenizing_model, const TextRows& rows) {
  bool begun = false;
  ReadOptions options;
  options.vocabulary = vocabulary;
  options.retokenizing_model = retokenizing_model;
  options.rows = rows;
  options.progress = [&](std::int64_t done, std::int64_t total) {
    if (!begun) context.progress.begin("reading", total, "bytes");
    begun = true;
    context.progress.advance_to(done);
  };
  RolloutFile file = read_rollouts(paths, options);
  if (begun) context.progress.end();
  for (const std::string& note : file.notes) context.progress.note("note: " + note);
  if (!file.notes.empty()) context.result["notes"] = file.notes;
  return file;
}

}  // namespace espalier::cli
