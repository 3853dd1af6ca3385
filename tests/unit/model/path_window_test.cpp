// A window over layers that sleep: who is brought and put away, and when, told by a keeper that only takes notes.
#include "espalier/model/path_window.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

namespace espalier {
namespace {

class NotingKeeper : public PathKeeper {
 public:
  bool one_place() const override { return true; }
  int add(const Member& member) override {
    members_.push_back(member);
    return static_cast<int>(members_.size()) - 1;
  }
  void ask(int member, std::int64_t) override { asked.insert(member); }
  void bring_back(int member, std::int64_t rows) override {
    note("bring", member, 0, rows);
    EXPECT_TRUE(here.insert(member).second) << "brought twice";
  }
  void put_away(int member, std::int64_t begin, std::int64_t end) override {
    note("put", member, begin, end);
    EXPECT_EQ(here.erase(member), 1U) << "put away and not there";
  }

  std::vector<std::string> notes;
  std::set<int> here, asked;

 private:
  void note(const char* what, int member, std::int64_t begin, std::int64_t end) {
    const Member& m = members_[static_cast<std::size_t>(member)];
    static constexpr const char* kNames[] = {"k", "v", "dk", "dv"};
    notes.push_back(std::string(what) + " " + kNames[m.number] + std::to_string(m.layer) + " " + std::to_string(begin) +
                    "-" + std::to_string(end));
  }

  std::vector<Member> members_;
};

class Window : public ::testing::Test {
 protected:
  void add_layers(PathWindow& window, std::int64_t layers) {
    for (std::int64_t layer = 0; layer < layers; ++layer) {
      std::vector<PathKeeper::Member> members(4);
      for (std::size_t number = 0; number < members.size(); ++number)
        members[number] = {.layer = layer, .number = number, .kinds = 2};
      window.add_layer(members);
    }
  }
  std::vector<std::string> taken() { return std::exchange(keeper_.notes, {}); }

  NotingKeeper keeper_;
};

TEST_F(Window, TheFirstLayersStayAndTheOthersTakeTurns) {
  PathWindow window(keeper_, 1);
  add_layers(window, 3);
  EXPECT_FALSE(window.sleeps(0));
  EXPECT_TRUE(window.sleeps(1) && window.sleeps(2));
  for (const std::int64_t layer : {0, 1, 2}) window.begin_forward(layer, 5);
  // Layer 1 is new: nothing of it was there, five rows of it were written.
  EXPECT_EQ(taken(), (std::vector<std::string>{"bring k1 0-0", "bring v1 0-0", "put k1 0-5", "put v1 0-5",
                                               "bring k2 0-0", "bring v2 0-0"}));
  // The backward begins where the forward ended: keys of layer 2 are still there, its gradients come.
  EXPECT_EQ(window.begin_backward(2, 5, 0), 0) << "no gradient of these rows exists yet";
  EXPECT_EQ(taken(), (std::vector<std::string>{"bring dk2 0-0", "bring dv2 0-0"}));
  window.end_backward(2);
  EXPECT_TRUE(taken().empty()) << "the pass goes on";
  window.begin_backward(1, 5, 0);
  EXPECT_EQ(taken(), (std::vector<std::string>{"put dk2 0-0", "put dv2 0-0", "put k2 0-5", "put v2 0-5", "bring k1 0-5",
                                               "bring v1 0-5", "bring dk1 0-0", "bring dv1 0-0"}));
  window.begin_backward(0, 5, 0);
  window.end_backward(0);
  EXPECT_EQ(taken(), (std::vector<std::string>{"put dk1 0-0", "put dv1 0-0"})) << "no gradient stays in memory";
}

TEST_F(Window, OnlyNewRowsOfALayerAreWrittenBack) {
  PathWindow window(keeper_, 0);
  add_layers(window, 2);
  for (const std::int64_t layer : {0, 1}) window.begin_forward(layer, 4);
  for (const std::int64_t layer : {0, 1}) window.begin_forward(layer, 6);
  std::vector<std::string> puts;
  for (const std::string& note : taken())
    if (note.starts_with("put k")) puts.push_back(note);
  EXPECT_EQ(puts, (std::vector<std::string>{"put k0 0-4", "put k1 0-4", "put k0 4-6"}));
}

TEST_F(Window, ABackwardEndsAtTheFirstLayerThatTrains) {
  PathWindow window(keeper_, 0, 1);
  add_layers(window, 3);
  for (const std::int64_t layer : {0, 1, 2}) window.begin_forward(layer, 3);
  window.begin_backward(2, 3, 3);
  keeper_.asked.clear();
  window.begin_backward(1, 3, 3);
  EXPECT_TRUE(keeper_.asked.empty()) << "nobody runs layer 0";
  taken();
  window.end_backward(1);
  EXPECT_EQ(taken(), (std::vector<std::string>{"put dk1 0-3", "put dv1 0-3"}));
}

TEST_F(Window, WhereNoRowCountsTheLayerInMemorySleeps) {
  PathWindow window(keeper_, 0);
  add_layers(window, 2);
  for (const std::int64_t layer : {0, 1}) window.begin_forward(layer, 4);
  window.forget_from(0);
  EXPECT_TRUE(keeper_.here.empty());
}

}  // namespace
}  // namespace espalier
