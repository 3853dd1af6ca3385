// main of every GoogleTest binary. ESPALIER_SWEEPS=K/N keeps one case of N of every test that has several, and at least
// one; a long test (tests/long_tests.txt) may have none. K = 1 to N together run all. tools/test_shares.py has the same
// rule.
#include <gtest/gtest.h>

#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/support/source_dir.h"

namespace {

using CaseNames = std::vector<std::string>;

std::uint32_t crc32(std::string_view text) {
  std::uint32_t crc = ~0U;
  for (const unsigned char byte : text) {
    crc ^= byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0xEDB88320U : 0U);
  }
  return ~crc;
}

// Parameters stand behind the last slash of a name: of the suite's, and of the test's.
std::string without_parameter(std::string_view name) { return std::string(name.substr(0, name.rfind('/'))); }

struct Test {
  CaseNames cases;
  bool has_parameters = false;
};

// By suite and name, without parameters: "Suite.Test".
std::map<std::string, Test> all_tests() {
  std::map<std::string, Test> tests;
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  for (int s = 0; s < all.total_test_suite_count(); ++s) {
    const testing::TestSuite& suite = *all.GetTestSuite(s);
    for (int t = 0; t < suite.total_test_count(); ++t) {
      const testing::TestInfo& test = *suite.GetTestInfo(t);
      const std::string group = test.type_param() != nullptr ? without_parameter(suite.name()) : suite.name();
      Test& of = tests[group + '.' + without_parameter(test.name())];
      of.has_parameters = test.value_param() != nullptr || test.type_param() != nullptr;
      of.cases.push_back(std::string(suite.name()) + '.' + test.name());
    }
  }
  return tests;
}

std::set<std::string> long_tests() {
  std::set<std::string> names;
  std::ifstream file(espalier::testing::source_dir() + "/tests/long_tests.txt");
  for (std::string name; file >> name;)
    if (name.front() == '#')
      std::getline(file, name);
    else
      names.insert(name);
  return names;
}

// GoogleTest's filter of the cases that `share`/`shares` leaves out.
std::string left_out(std::uint32_t share, std::uint32_t shares) {
  std::string filter;
  const std::set<std::string> long_names = long_tests();
  for (const auto& [name, test] : all_tests()) {
    const bool is_long = long_names.contains(name);
    if (!is_long && !test.has_parameters) continue;
    const auto is_kept = [&](const std::string& one) { return crc32(one) % shares == share - 1; };
    bool any = is_long;
    for (const std::string& one : test.cases) any = any || is_kept(one);
    for (const std::string& one : test.cases)
      if (any ? !is_kept(one) : one != test.cases.front()) filter += (filter.empty() ? "" : ":") + one;
  }
  return filter;
}

// Reads "K/N", 1 <= K <= N.
bool read_share(std::string_view text, std::uint32_t& share, std::uint32_t& shares) {
  const char* const end = text.data() + text.size();
  const auto [slash, error] = std::from_chars(text.data(), end, share);
  if (error != std::errc() || slash == end || *slash != '/') return false;
  const auto [rest, error_of_shares] = std::from_chars(slash + 1, end, shares);
  return error_of_shares == std::errc() && rest == end && 1 <= share && share <= shares;
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (const char* const sweeps = std::getenv("ESPALIER_SWEEPS");
      sweeps != nullptr && std::string_view(sweeps) != "all") {
    std::uint32_t share = 0, shares = 0;
    if (!read_share(sweeps, share, shares)) {
      std::cerr << "ESPALIER_SWEEPS: expected all or K/N with 1 <= K <= N, as 1/8, got '" << sweeps << "'\n";
      return 2;
    }
    if (const std::string names = left_out(share, shares); !names.empty()) {
      const std::string asked = testing::GTEST_FLAG(filter);
      testing::GTEST_FLAG(filter) = asked + (asked.find('-') == std::string::npos ? '-' : ':') + names;
    }
  }
  return RUN_ALL_TESTS();
}
