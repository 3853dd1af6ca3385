#include "cli/profile_text.h"

#include <iomanip>

#include "espalier/base/error.h"
#include "espalier/base/units.h"

namespace espalier::cli {

void print_profile(std::ostream& out, const StepProfile& profile) {
  if (profile.read > 0)
    out << "  read, before the step           " << std::setw(10) << format_seconds(profile.read) << '\n';
  double total = 0;
  for (const auto& part : profile.seconds) total += part.second;
  for (const auto& [name, seconds] : profile.seconds) {
    out << "  " << std::left << std::setw(32) << name << std::right << std::setw(10) << format_seconds(seconds)
        << std::setw(9) << format_percent(total > 0 ? seconds / total : 0);
    if (name == "matrix products")
      out << "  at " << format_percent(profile.product_rate_share()) << " of the measured rate";
    out << '\n';
  }
  for (const StepTraffic::OfAxis& axis : profile.collectives.by_axis())
    out << "  " << std::left << std::setw(32) << text_of(axis.axis, ", ", axis.calls, " collectives") << std::right
        << std::setw(10) << format_seconds(axis.seconds) << "  " << format_bytes(axis.bytes) << " given, "
        << format_percent(axis.seconds > 0 ? axis.hidden / axis.seconds : 0) << " of the time beside other work\n";
}

}  // namespace espalier::cli
