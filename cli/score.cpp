// `score`: writes log-probs beside the records.
#include "espalier/score/score.h"

#include "cli/verbs.h"
#include "espalier/base/units.h"

namespace espalier::cli {

int run_score(Context& context) {
  const ScoreReport report = score(context.options, context.progress, context.mesh);
  context.result["rollouts"] = report.rollouts;
  context.result["tokens"] = report.tokens;
  context.result["rows"] = {{"logical", report.logical_rows}, {"physical", report.physical_rows}};
  context.result["scoring_seconds"] = report.seconds;
  context.text << format_count(report.rollouts) << (report.scores ? " responses scored, from " : " rollouts, ");
  if (!report.scores) context.text << format_count(report.tokens) << " log-probs from ";
  context.text << format_count(report.physical_rows) << " tokens computed of " << format_count(report.logical_rows)
               << ", in " << format_seconds(report.seconds) << "\nwritten: " << context.options.out << "\n";
  return 0;
}

}  // namespace espalier::cli
