// Memory that stands beside a step.
#include "espalier/step/workspace.h"

#include <gtest/gtest.h>

#include <optional>

namespace espalier {
namespace {

TEST(Workspace, AHolderCountsBesideTheOthersAsLongAsItExists) {
  Workspace workspace(1 << 20);
  const HeldBytes actor(workspace, 100);
  std::optional<HeldBytes> critic(std::in_place, workspace, 30);
  EXPECT_EQ(workspace.held_bytes(), 130);
  EXPECT_EQ(workspace.held_beside(actor), 30);
  EXPECT_EQ(workspace.held_beside(*critic), 100);
  EXPECT_EQ(workspace.held_beside(60), 70);  // weights within the actor's bytes
  EXPECT_EQ(workspace.held_beside(200), 0);  // weights that nobody entered
  critic.reset();
  EXPECT_EQ(workspace.held_beside(actor), 0);
}

}  // namespace
}  // namespace espalier
