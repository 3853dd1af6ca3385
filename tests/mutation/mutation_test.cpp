// Tests of the tests: without a fault the battery finds nothing, and it finds every fault that there is.
// The report says which checks noticed which fault.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <optional>
#include <regex>
#include <set>
#include <sstream>

#include "tests/mutation/battery.h"
#include "tests/mutation/faults.h"
#include "tests/support/source_dir.h"

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
  const Findings findings = battery_->run([] {});
  for (const Finding& finding : findings.all()) ADD_FAILURE() << finding.check << ": " << finding.what;
}

class Faults : public Mutation, public ::testing::WithParamInterface<Fault> {};

TEST_P(Faults, IsNoticed) {
  const Fault& fault = GetParam();
  SwitchedOn on(fault);
  const Findings findings = battery_->run([&] { on.begin_check(); });
  ASSERT_GT(on.times(), 0) << "nothing in the battery comes to the line of this fault";
  entries_.push_back({fault, findings});
  EXPECT_FALSE(findings.all().empty()) << fault.meaning;
  EXPECT_TRUE(findings.by("verify") || !fault.seen_by_verify) << fault.meaning << "; found by " << list_of(findings);
}

INSTANTIATE_TEST_SUITE_P(Deliberate, Faults, ::testing::ValuesIn(all_faults()),
                         [](const auto& info) { return name_of(info.param); });

// Every fault of the engine is in the list, and every fault of the list in the engine.
TEST(FaultList, IsThatOfTheEngine) {
  std::set<std::string> listed, written;
  for (const Fault& fault : all_faults()) {
    listed.insert(fault.name);
    if (!fault.together_with.empty()) listed.insert(fault.together_with);
  }
  const std::regex pattern("ESPALIER_MUTATION\\((\\w+)\\)");
  for (const auto& file : std::filesystem::recursive_directory_iterator(testing::source_dir() + "/espalier")) {
    if (file.path().extension() != ".cpp") continue;
    std::ifstream in(file.path());
    const std::string text{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
    for (std::sregex_iterator match(text.begin(), text.end(), pattern), end; match != end; ++match)
      written.insert((*match)[1]);
  }
  EXPECT_EQ(listed, written);
}

}  // namespace
}  // namespace espalier::testing
