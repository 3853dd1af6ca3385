#include "espalier/metrics/timer.h"

#include <gtest/gtest.h>

namespace espalier {
namespace {

double now = 0;
double test_clock() { return now; }

TEST(Timer, PartsAndRestAddUpToTheTotal) {
  now = 100;
  Timer timer(test_clock);
  now += 1;
  {
    const TimedPart outer(timer, "waves");
    now += 2;
    {
      const TimedPart inner(timer, "plan");
      now += 4;
    }
    now += 8;
  }
  now += 16;
  EXPECT_EQ(timer.total(), 31);
  EXPECT_EQ(timer.seconds("waves"), 10);
  EXPECT_EQ(timer.seconds("plan"), 4);
  EXPECT_EQ(timer.rest(), 17);
  EXPECT_EQ(timer.seconds("never"), 0);
}

TEST(Timer, APartUsedTwiceIsOnePart) {
  now = 0;
  Timer timer(test_clock);
  for (int i = 0; i < 3; ++i) {
    const TimedPart part(timer, "wave");
    now += 5;
  }
  ASSERT_EQ(timer.parts().size(), 1u);
  EXPECT_EQ(timer.seconds("wave"), 15);
}

TEST(Timer, AnOpenPartCountsUpToNow) {
  now = 0;
  Timer timer(test_clock);
  const TimedPart part(timer, "wave");
  now += 3;
  EXPECT_EQ(timer.seconds("wave"), 3);
  EXPECT_EQ(timer.rest(), 0);
}

TEST(Timer, TheSteadyClockMovesForward) {
  Timer timer;
  const double first = timer.total();
  EXPECT_GE(first, 0);
  EXPECT_GE(timer.total(), first);
}

}  // namespace
}  // namespace espalier
