// main of every GoogleTest binary. ESPALIER_SWEEPS=K/N keeps one case of N of every test that has several: each test
// runs at least one, and K = 1 to N together run all. tests/python/conftest.py chooses by the same rule.
#include <gtest/gtest.h>

#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

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

// The cases of each test, for tests with parameters.
std::map<std::pair<std::string, std::string>, CaseNames> cases_of_tests() {
  std::map<std::pair<std::string, std::string>, CaseNames> cases;
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  for (int s = 0; s < all.total_test_suite_count(); ++s) {
    const testing::TestSuite& suite = *all.GetTestSuite(s);
    for (int t = 0; t < suite.total_test_count(); ++t) {
      const testing::TestInfo& test = *suite.GetTestInfo(t);
      if (test.value_param() == nullptr && test.type_param() == nullptr) continue;
      const std::string group = test.type_param() != nullptr ? without_parameter(suite.name()) : suite.name();
      cases[{group, without_parameter(test.name())}].push_back(std::string(suite.name()) + '.' + test.name());
    }
  }
  return cases;
}

// GoogleTest's filter of the cases that `share`/`shares` leaves out.
std::string left_out(std::uint32_t share, std::uint32_t shares) {
  std::string filter;
  for (const auto& [test, cases] : cases_of_tests()) {
    const auto is_kept = [&](const std::string& name) { return crc32(name) % shares == share - 1; };
    bool any = false;
    for (const std::string& name : cases) any = any || is_kept(name);
    for (const std::string& name : cases)
      if (any ? !is_kept(name) : name != cases.front()) filter += (filter.empty() ? "" : ":") + name;
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
