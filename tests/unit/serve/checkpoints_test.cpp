// Checkpoints in the server's folder: found again, listed in their order, removed when their time is over.
#include "espalier/serve/checkpoints.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

namespace espalier::serve {
namespace {

namespace fs = std::filesystem;

class CheckpointsTest : public testing::Test {
 protected:
  CheckpointsTest() : state(fs::path(testing::TempDir()) / "checkpoints_test") { fs::remove_all(state); }
  ~CheckpointsTest() override { fs::remove_all(state); }

  // A checkpoint's files, as the engine writes them.
  Checkpoint write(const Checkpoints& all, const std::string& name, double created) {
    Checkpoint one;
    one.name = {"s1:train:0", CheckpointKind::sampler, name};
    one.base = "tiny", one.created = created;
    fs::create_directories(all.folder(one.name));
    std::ofstream(all.folder(one.name) / kDescription) << one.description();
    std::ofstream(all.folder(one.name) / "adapter_model.safetensors") << "12345678";
    return one;
  }

  fs::path state;
};

TEST_F(CheckpointsTest, AreFoundAgainInTheOrderOfTheirCreation) {
  {
    Checkpoints all(state);
    all.add(write(all, "late", 20));
    all.add(write(all, "early", 10));
  }
  fs::create_directories(state / "runs" / "s1:train:0" / "sampler_weights" / "not whole");
  const Checkpoints again(state);
  ASSERT_EQ(again.all().size(), 2);
  EXPECT_EQ(again.all()[0].name.name, "early");
  EXPECT_EQ(again.all()[1].name.name, "late");
  EXPECT_GT(again.all()[0].bytes, 8);
}

TEST_F(CheckpointsTest, GoWhenTheirTimeIsOver) {
  Checkpoints all(state);
  const Checkpoint kept = write(all, "kept", 10), short_lived = write(all, "short", 11);
  all.add(kept), all.add(short_lived);
  EXPECT_TRUE(all.set_expiry(short_lived.name, 100));
  all.remove_expired(99);
  EXPECT_EQ(Checkpoints(state).all().size(), 2);  // with its time
  Checkpoints again(state);
  again.remove_expired(100);
  EXPECT_FALSE(fs::exists(again.folder(short_lived.name)));
  EXPECT_NE(again.find(kept.name), nullptr);
  EXPECT_EQ(again.find(short_lived.name), nullptr);
  EXPECT_FALSE(again.set_expiry(short_lived.name, {}));
}

}  // namespace
}  // namespace espalier::serve
