#include "espalier/report/report.h"

#include "espalier/base/atomic_file.h"
#include "espalier/metrics/event_file.h"
#include "espalier/metrics/metric_tags.h"
#include "espalier/report/page.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;

bool has_events(const fs::path& folder) {
  std::error_code unreadable;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, unreadable))
    if (entry.path().filename().string().starts_with("events.out.tfevents.")) return true;
  return false;
}

fs::path write_events(const RunRecord& run, const fs::path& folder) {
  EventFile events(folder);
  for (const auto* lines : {&run.warm_start, &run.steps, &run.evaluations})
    for (const Json& line : *lines) add_scalars(events, line);
  events.flush();
  return events.path();
}

}  // namespace

ReportFiles write_report(const fs::path& folder, const fs::path& out) {
  const RunRecord run = read_run(folder);
  const fs::path target = resolved_target(out.empty() ? folder / "report.html" : out);
  AtomicFile page(target);
  page.write(page_of(run));
  page.commit();
  const fs::path beside = target.parent_path();
  if (has_events(metrics_folder(folder)) || has_events(beside)) return {target, {}};
  return {target, write_events(run, beside)};
}

}  // namespace espalier
