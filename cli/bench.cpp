// `bench`: a row a cell.
#include "espalier/prove/bench.h"

#include <iomanip>
#include <sstream>

#include "cli/profile_text.h"
#include "cli/verbs.h"
#include "espalier/base/error.h"
#include "espalier/step/step_json.h"

namespace espalier::cli {
namespace {

struct BenchColumn {
  const char* name;
  BenchMeasure BenchCell::*measure;
};
constexpr BenchColumn kColumns[] = {{"dense", &BenchCell::dense},
                                    {"packed", &BenchCell::packed},
                                    {"phased", &BenchCell::phased},
                                    {"auto", &BenchCell::automatic}};

// A schedule that did not run (--schedule) has null.
template <class Member>
Json by_schedule(const BenchCell& cell, Member member) {
  Json out;
  for (const BenchColumn& column : kColumns)
    out[column.name] = (cell.*column.measure).runs.empty() ? Json(nullptr) : Json(cell.*column.measure.*member);
  return out;
}

// The scalars describe the schedule auto; every schedule's own figures stand under "schedules".
Json cell_json(const BenchCell& cell) {
  Json out;
  out["prefix"] = cell.prefix;
  out["suffix"] = cell.suffix;
  out["n"] = cell.n;
  out["seconds"] = by_schedule(cell, &BenchMeasure::seconds);
  out["runs"] = by_schedule(cell, &BenchMeasure::runs);
  out["speedup"] = cell.speedup();
  out["ceiling"] = cell.ceiling;
  out["fraction"] = cell.fraction();
  out["chosen"] = cell.chosen;
  out["same_plan"] = cell.same_plan.empty() ? Json(nullptr) : Json(cell.same_plan);
  out["predicted_seconds"] = cell.automatic.predicted_seconds;
  out["peak_bytes"] = cell.automatic.peak_bytes;
  out["predicted_peak_bytes"] = cell.automatic.predicted_peak_bytes;
  out["gradient_error"] = cell.automatic.gradient_error;
  out["schedules"] = {{"predicted_seconds", by_schedule(cell, &BenchMeasure::predicted_seconds)},
                      {"peak_bytes", by_schedule(cell, &BenchMeasure::peak_bytes)},
                      {"predicted_peak_bytes", by_schedule(cell, &BenchMeasure::predicted_peak_bytes)},
                      {"flops", by_schedule(cell, &BenchMeasure::flops)},
                      {"rows", by_schedule(cell, &BenchMeasure::physical_rows)},
                      {"product_flops_per_second", by_schedule(cell, &BenchMeasure::product_flops_per_second)},
                      {"gradient_error", by_schedule(cell, &BenchMeasure::gradient_error)}};
  out["product_flops_per_second"] = cell.product_flops_per_second;
  out["profile_flops_per_second"] = cell.profile_flops_per_second;
  out["fitted_steps"] = cell.fitted_steps;
  for (const BenchColumn& column : kColumns)
    if (const auto& profile = (cell.*column.measure).profile)
      out["schedules"]["profile"][column.name] = profile_json(*profile);
  return out;
}

// At most 120 columns, as wide as a terminal; the figures of the other schedules are in --json.
void print_header(std::ostream& out) {
  out << "prompt/response   n |dense s packed phased   auto | speed-up at most reach | predicted |   MiB  pred. | "
         "grad.err"
         "  auto is\n";
}

void print_cell(std::ostream& out, const BenchCell& cell) {
  const BenchMeasure& automatic = cell.automatic;
  const auto mebibytes = [](std::int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); };
  out << std::setw(15) << text_of(cell.prefix, "/", cell.suffix) << std::setw(4) << cell.n << " |" << std::fixed
      << std::setprecision(3);
  for (const BenchColumn& column : kColumns) {
    const BenchMeasure& measure = cell.*column.measure;
    out << std::setw(7);
    measure.runs.empty() ? out << '-' : out << measure.seconds;
  }
  out << " |" << std::setprecision(2) << std::setw(9) << cell.speedup() << std::setw(8) << cell.ceiling
      << std::setprecision(0) << std::setw(4) << 100 * cell.fraction() << " % |" << std::setprecision(3) << std::setw(8)
      << automatic.predicted_seconds << " s |" << std::setprecision(0) << std::setw(6)
      << mebibytes(automatic.peak_bytes) << std::setw(7) << mebibytes(automatic.predicted_peak_bytes) << " |"
      << std::scientific << std::setprecision(1) << std::setw(9) << automatic.gradient_error << "  " << cell.chosen
      << '\n'
      << std::defaultfloat << std::flush;
}

}  // namespace

int run_bench(Context& context) {
  context.result["cells"] = Json::array();
  const auto print = [&](const BenchCell& cell) {
    context.progress.end();  // takes the bar away; the next report draws it again
    if (context.result["cells"].empty()) print_header(context.text);  // not before an error
    print_cell(context.text, cell);
    for (const BenchColumn& column : kColumns)
      if (const auto& profile = (cell.*column.measure).profile) {
        context.text << column.name << '\n';
        print_profile(context.text, *profile);
      }
    context.result["cells"].push_back(cell_json(cell));
  };
  bench(context.options, context.progress, print, context.mesh);
  return 0;
}

}  // namespace espalier::cli
