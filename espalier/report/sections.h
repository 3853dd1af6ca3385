// The parts of a report's page. Each is empty where the run has nothing for it.
#pragma once

#include <string>

#include "espalier/report/run_record.h"

namespace espalier {

std::string verdict_section(const RunRecord& run);   // the numbers to read first
std::string learning_section(const RunRecord& run);  // curves over steps
std::string time_section(const RunRecord& run);      // seconds of the phases, rows saved
std::string memory_section(const RunRecord& run);    // peaks of the phases, measured and predicted
std::string plan_section(const RunRecord& run);      // prefix trees and schedule
std::string samples_section(const RunRecord& run);   // responses before and after
std::string numbers_section(const RunRecord& run);   // what the curves are drawn from, as a table
std::string options_section(const RunRecord& run);   // everything in run.json

}  // namespace espalier
