// espalier doctor DUMP...
#include "espalier/doctor/doctor.h"
#include "cli/verbs.h"
#include "espalier/base/error.h"
#include "espalier/base/units.h"

namespace espalier::cli {
namespace {

Json finding_json(const Diagnosis& diagnosis, const Finding& finding) {
  Json rows = Json::array();
  for (const std::int64_t row : finding.rows) rows.push_back(diagnosis.rollouts[static_cast<std::size_t>(row)].where);
  return {{"kind", name_of(finding.fault)}, {"sure", name_of(finding.sure)},      {"rows", std::move(rows)},
          {"text", finding.text},           {"report", report_of(finding.fault)}, {"remedy", remedy_of(finding.fault)}};
}

void print(std::ostream& out, const Diagnosis& diagnosis, const Finding& finding) {
  constexpr std::size_t kShown = 5;
  out << name_of(finding.fault) << " (" << name_of(finding.sure) << ")\n  " << finding.text << "\n  rows    ";
  for (std::size_t i = 0; i < std::min(kShown, finding.rows.size()); ++i)
    out << (i == 0 ? "" : ", ") << diagnosis.rollouts[static_cast<std::size_t>(finding.rows[i])].where;
  if (finding.rows.size() > kShown) out << " and " << finding.rows.size() - kShown << " more";
  out << "\n  report  " << report_of(finding.fault) << "\n  remedy  " << remedy_of(finding.fault) << "\n\n";
}

}  // namespace

int run_doctor(Context& context) {
  const Diagnosis diagnosis = diagnose(context.arguments, context.options, context.progress);
  const std::size_t found = diagnosis.findings.size();
  context.result["rollouts"] = diagnosis.rollouts.size();
  context.result["replayed"] = {{"rollouts", diagnosis.replayed}, {"tokens", diagnosis.replayed_tokens}};
  context.result["findings"] = Json::array();
  for (const Finding& finding : diagnosis.findings) {
    context.result["findings"].push_back(finding_json(diagnosis, finding));
    print(context.text, diagnosis, finding);
  }
  context.text << format_count(static_cast<std::int64_t>(diagnosis.rollouts.size())) << " rollouts, ";
  if (context.options.model.empty())
    context.text << "none replayed (--model)";
  else
    context.text << format_count(diagnosis.replayed) << " of them replayed, " << format_count(diagnosis.replayed_tokens)
                 << " tokens";
  context.text << ": " << (found == 0 ? "no known fault" : text_of(found, found == 1 ? " fault" : " faults")) << '\n';
  return found == 0 ? 0 : kFailedVerification;
}

}  // namespace espalier::cli
