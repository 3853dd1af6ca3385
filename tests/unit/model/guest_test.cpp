// The order in which guests hear of the stops of a pass: every rank of a group must call its collectives in it.
#include "espalier/model/guest.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace espalier {
namespace {

using Kind = Stop::Kind;

class Logging : public Guest {
 public:
  Logging(std::string name, std::vector<std::string>& log) : name_(std::move(name)), log_(log) {}

  void ahead(const Stop& stop) override { add("ahead", stop); }
  void enter(const Stop& stop) override { add("enter", stop); }
  void leave(const Stop& stop) override { add("leave", stop); }

 private:
  void add(const char* what, const Stop& stop) { log_.push_back(name_ + " " + what + " " + std::to_string(stop.unit)); }

  std::string name_;
  std::vector<std::string>& log_;
};

TEST(Walk, EveryGuestEntersBeforeTheWorkAndLeavesBehindIt) {
  std::vector<std::string> log;
  Logging a("a", log), b("b", log);
  const std::vector<Stop> stops{{Kind::layer, Pass::forward, 0}, {Kind::layer, Pass::forward, 1}};
  walk(stops, {&a, nullptr, &b}, [&](const Stop& stop) { log.push_back("run " + std::to_string(stop.unit)); });
  EXPECT_EQ(log, (std::vector<std::string>{"a ahead 0", "b ahead 0",                                     //
                                           "a enter 0", "a ahead 1", "b enter 0", "b ahead 1", "run 0",  //
                                           "a leave 0", "b leave 0",                                     //
                                           "a enter 1", "b enter 1", "run 1", "a leave 1", "b leave 1"}));
}

// A rank without rows calls what one with rows calls.
TEST(Walk, WithoutWorkTheGuestsHearTheSame) {
  const std::vector<Stop> stops{
      {Kind::embedding, Pass::forward, -1}, {Kind::layer, Pass::forward, 0}, {Kind::final_norm, Pass::forward, -2}};
  std::vector<std::string> with_rows, without;
  Logging a("g", with_rows), b("g", without);
  walk(stops, {&a}, [](const Stop&) {});
  walk(stops, {&b});
  EXPECT_EQ(with_rows, without);
  EXPECT_EQ(with_rows.size(), 3 * stops.size());
}

TEST(Walk, NoStopsAreNoCalls) {
  std::vector<std::string> log;
  Logging guest("g", log);
  walk({}, {&guest});
  EXPECT_TRUE(log.empty());
}

}  // namespace
}  // namespace espalier
