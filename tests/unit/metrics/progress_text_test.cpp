#include "espalier/metrics/progress_text.h"

#include <gtest/gtest.h>

#include <vector>

#include "espalier/metrics/part_progress.h"

namespace espalier {
namespace {

// A progress whose clock stands still until the test moves it.
struct Watched {
  std::vector<std::string> written;
  double now = 0;
  ProgressText progress;

  explicit Watched(bool terminal, std::size_t width = 80)
      : progress(
            {[this](std::string_view text) { written.emplace_back(text); }, [this] { return now; }, terminal, width}) {}
  void advance(double seconds, std::int64_t done) {
    now += seconds;
    progress.advance_to(done);
  }
};

TEST(ProgressText, WritesPlainLinesRarelyWhereThereIsNoTerminal) {
  Watched watched(false);
  watched.progress.begin("reading", 1000, "rollouts");
  for (int i = 1; i <= 100; ++i) watched.advance(0.125, i);  // 12.5 s: two lines at 5 s each
  watched.progress.end();
  ASSERT_EQ(watched.written.size(), 2u);
  EXPECT_EQ(watched.written[1], "reading 8 %: 80 of 1,000 rollouts, 8 a second, 1 min 55 s left\n");
}

TEST(ProgressText, SaysNothingAboutShortWork) {
  Watched watched(false);
  watched.progress.begin("reading", 10, "rollouts");
  for (int i = 1; i <= 10; ++i) watched.advance(0.01, i);
  watched.progress.end();
  EXPECT_TRUE(watched.written.empty());
}

TEST(ProgressText, DrawsABarAtMostTenTimesASecondAndTakesItAway) {
  Watched watched(true);
  watched.progress.begin("reading", 1000, "rollouts");
  for (int i = 1; i <= 1000; ++i) watched.advance(0.001, i);
  EXPECT_GE(watched.written.size(), 9u);
  EXPECT_LE(watched.written.size(), 10u);
  const std::string& last = watched.written.back();
  EXPECT_EQ(last.substr(0, 4), "\r\x1b[K");
  EXPECT_NE(last.find("[====="), last.npos);
  EXPECT_NE(last.find(" left"), last.npos);
  watched.progress.end();
  EXPECT_EQ(watched.written.back(), "\r\x1b[K");
}

TEST(ProgressText, NeverFillsTheLineOfTheTerminal) {
  for (std::size_t width : {1u, 20u, 50u, 80u, 200u}) {
    Watched watched(true, width);
    watched.progress.begin("a task with a long name", 1000000, "rollouts");
    watched.advance(1, 999999);
    ASSERT_EQ(watched.written.size(), 1u);
    EXPECT_LT(watched.written[0].size(), width + 4);  // "\r\x1b[K" takes no column
  }
}

TEST(ProgressText, CountsWithoutAKnownTotal) {
  Watched watched(false);
  watched.progress.begin("reading", 0, "bytes");
  watched.advance(10, 10 << 20);
  ASSERT_EQ(watched.written.size(), 1u);
  EXPECT_EQ(watched.written[0], "reading  10.00 MiB, 1.00 MiB a second\n");
}

TEST(ProgressText, SaysHowLongOneTakesWhereTheyAreSlow) {
  Watched watched(false);
  watched.progress.begin("training", 4, "steps");
  watched.advance(20, 2);
  EXPECT_EQ(watched.written.at(0), "training 50 %: 2 of 4 steps, 10 s each, 20 s left\n");
}

TEST(ProgressText, EstimatesNothingFromTheFirstFewOfMany) {
  Watched watched(false);
  watched.progress.begin("weights", 260032, "parameters");
  watched.advance(6, 7);
  EXPECT_EQ(watched.written.at(0), "weights 0 %: 7 of 260,032 parameters\n");
}

TEST(ProgressText, NothingIsLeftAtTheEnd) {
  Watched watched(false);
  watched.progress.begin("training", 2, "steps");
  watched.advance(12, 2);
  EXPECT_EQ(watched.written.at(0), "training 100 %: 2 of 2 steps, 6 s each\n");
}

TEST(ProgressText, ANoteStandsOnItsOwnLine) {
  Watched watched(true);
  watched.progress.begin("reading", 10, "rollouts");
  watched.advance(1, 5);
  watched.progress.note("unknown field reward_model");
  EXPECT_EQ(watched.written.at(1), "\r\x1b[K");
  EXPECT_EQ(watched.written.at(2), "unknown field reward_model\n");
}

TEST(PartProgress, PartsAreNamedBehindTheBarOfTheRun) {
  Watched watched(false);
  PartProgress run(watched.progress);
  run.begin_run("training", 4, "steps");
  run.begin("generating", 200, "tokens");
  watched.now += 20;
  run.advance_run_to(2);
  run.end();
  run.begin("rewards", 10, "responses");
  watched.now += 20;
  run.advance_to(7);
  ASSERT_EQ(watched.written.size(), 2u);
  EXPECT_EQ(watched.written[0], "training 50 %: 2 of 4 steps, 10 s each, 20 s left; generating 0 %\n");
  EXPECT_EQ(watched.written[1], "training 50 %: 2 of 4 steps, 20 s each, 40 s left; rewards 70 %\n");
}

}  // namespace
}  // namespace espalier
