// `report`: a run's folder to one HTML file.
#include "espalier/report/report.h"

#include "cli/verbs.h"

namespace espalier::cli {

int run_report(Context& context) {
  const ReportFiles files = write_report(context.arguments.front(), context.options.out);
  context.text << "written: " << files.page.string() << "\n";
  context.result["page"] = files.page.string();
  if (!files.events.empty()) {
    context.text << "written: " << files.events.string() << "\n";
    context.result["events"] = files.events.string();
  }
  return 0;
}

}  // namespace espalier::cli
