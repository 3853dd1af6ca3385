// Tests of the tests: without a fault the battery finds nothing, and it finds every fault that there is.
// A fault faces the checks until those that have to notice it did; with ESPALIER_ALL_CHECKS=1 all of them, and the
// report says which noticed which fault.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <iterator>
#include <optional>
#include <sstream>
#include <vector>

#include "tests/mutation/battery.h"
#include "tests/mutation/faults.h"

namespace espalier::testing {

void PrintTo(const Fault& fault, std::ostream* out) { *out << fault.meaning; }

namespace {

std::string name_of(const Fault& fault) {
  return fault.name + (fault.together_with.empty() ? "" : "_and_" + fault.together_with);
}

struct Entry {
  Fault fault;
  Findings findings;
};

std::string list_of(const Findings& findings) {
  std::string list;
  for (const Finding& finding : findings.all()) list += (list.empty() ? "" : ", ") + finding.check;
  return list.empty() ? "NOTHING" : list;
}

class Mutation : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    if (!battery_) battery_.emplace();
  }
  static void TearDownTestSuite() {
    battery_.reset();
    if (!entries_.empty()) report();
    entries_.clear();
  }

  static void report() {
    std::ostringstream text;
    for (const Entry& entry : entries_) {
      text << std::left << std::setw(46) << name_of(entry.fault) << list_of(entry.findings)
           << "\n    fault: " << entry.fault.meaning << "\n";
      for (const Finding& finding : entry.findings.all())
        text << "    " << finding.check << ": " << finding.what.substr(0, finding.what.find('\n')) << "\n";
    }
    std::ofstream(ESPALIER_MUTATION_REPORT) << text.str();
    std::cout << "Deliberate faults and the checks that noticed them (in full: " << ESPALIER_MUTATION_REPORT << ")\n";
    for (const Entry& entry : entries_)
      std::cout << "  " << std::left << std::setw(46) << name_of(entry.fault) << list_of(entry.findings) << "\n";
  }

  static std::optional<Battery> battery_;
  static std::vector<Entry> entries_;
};

std::optional<Battery> Mutation::battery_;
std::vector<Entry> Mutation::entries_;

TEST_F(Mutation, ANoFaultIsNotFound) {
  const Findings findings = battery_->run([] {}, [](const Findings&) { return false; });
  for (const Finding& finding : findings.all()) ADD_FAILURE() << finding.check << ": " << finding.what;
}

class Faults : public Mutation, public ::testing::WithParamInterface<Fault> {};

TEST_P(Faults, IsNoticed) {
  const Fault& fault = GetParam();
  SwitchedOn on(fault);
  const bool all = std::getenv("ESPALIER_ALL_CHECKS") != nullptr;
  const Findings findings =
      battery_->run([&] { on.begin_check(); },
                    [&](const Findings& so_far) {
                      return !all && (fault.seen_by_verify ? so_far.by("verify") : !so_far.all().empty());
                    });
  ASSERT_GT(on.times(), 0) << "nothing in the battery comes to the line of this fault";
  entries_.push_back({fault, findings});
  EXPECT_FALSE(findings.all().empty()) << fault.meaning;
  EXPECT_TRUE(findings.by("verify") || !fault.seen_by_verify) << fault.meaning << "; found by " << list_of(findings);
}

std::vector<Fault> harmful_faults() {
  std::vector<Fault> harmful;
  std::ranges::copy_if(all_faults(), std::back_inserter(harmful), &Fault::alone);
  return harmful;
}

INSTANTIATE_TEST_SUITE_P(Deliberate, Faults, ::testing::ValuesIn(harmful_faults()),
                         [](const auto& info) { return name_of(info.param); });

// A fault that hides another is itself in the list: a name that no fault has would leave the hidden one in sight.
TEST(FaultList, HasWhatStandsTogether) {
  for (const Fault& fault : all_faults())
    EXPECT_TRUE(fault.together_with.empty() || std::ranges::count(all_faults(), fault.together_with, &Fault::name) == 1)
        << fault.together_with;
}

}  // namespace
}  // namespace espalier::testing
