// Environment variables as launchers set them.
#include "espalier/parallel/launch.h"

#include <gtest/gtest.h>

#include <map>

#include "espalier/base/error.h"

namespace espalier {
namespace {

Launch launch_with(const std::map<std::string, std::string>& variables) {
  return launch_of([&](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

TEST(Launch, OneProcessWithoutALauncher) {
  const Launch launch = launch_with({});
  EXPECT_EQ(launch.ranks, 1);
  EXPECT_TRUE(launch.launcher.empty() && launch.speaks());
}

TEST(Launch, TorchrunServesTheMeetingPlace) {
  const Launch launch = launch_with({{"RANK", "5"},
                                     {"WORLD_SIZE", "8"},
                                     {"LOCAL_RANK", "1"},
                                     {"LOCAL_WORLD_SIZE", "4"},
                                     {"MASTER_ADDR", "node7"},
                                     {"MASTER_PORT", "1234"},
                                     {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                     {"TORCHELASTIC_RESTART_COUNT", "2"},
                                     {"TORCHELASTIC_RUN_ID", "job"}});
  EXPECT_EQ(launch.launcher, "torchrun");
  EXPECT_EQ(launch.rank, 5);
  EXPECT_EQ(launch.ranks, 8);
  EXPECT_EQ(launch.local_rank, 1);
  EXPECT_EQ(launch.local_ranks, 4);
  EXPECT_EQ(launch.host, "node7");
  EXPECT_EQ(launch.port, 1234);
  EXPECT_EQ(launch.restarts, 2);
  EXPECT_TRUE(launch.served && launch.run.starts_with("job:") && !launch.speaks());
}

TEST(Launch, SrunNamesItsFirstNode) {
  const std::map<std::string, std::string> step = {{"SLURM_PROCID", "3"},
                                                   {"SLURM_STEP_NUM_TASKS", "8"},
                                                   {"SLURM_LOCALID", "3"},
                                                   {"SLURM_STEP_TASKS_PER_NODE", "4(x2)"},
                                                   {"SLURM_STEP_NODELIST", "gpu[03-05,9]"},
                                                   {"SLURM_JOB_ID", "50017"}};
  const Launch launch = launch_with(step);
  EXPECT_EQ(launch.launcher, "srun");
  EXPECT_EQ(launch.rank, 3);
  EXPECT_EQ(launch.ranks, 8);
  EXPECT_EQ(launch.local_rank, 3);
  EXPECT_EQ(launch.local_ranks, 4);
  EXPECT_EQ(launch.host, "gpu03");
  EXPECT_EQ(launch.port, 30017);
  EXPECT_FALSE(launch.served);
  // A batch script's own shell is no step of several tasks.
  EXPECT_EQ(launch_with({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}}).ranks, 1);
}

TEST(Launch, MpirunOnSeveralMachinesNeedsAnAddress) {
  std::map<std::string, std::string> world = {{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "2"}};
  EXPECT_EQ(launch_with(world).rank, 1);
  EXPECT_EQ(launch_with(world).host, "127.0.0.1");
  world["OMPI_COMM_WORLD_LOCAL_SIZE"] = "1", world["OMPI_COMM_WORLD_LOCAL_RANK"] = "0";
  EXPECT_THROW(launch_with(world), OptionError);
  world["MASTER_ADDR"] = "head", world["MASTER_PORT"] = "7";
  EXPECT_EQ(launch_with(world).host, "head");
  EXPECT_EQ(launch_with(world).port, 7);
  EXPECT_EQ(launch_with(world).local_rank, 0);
}

TEST(Launch, ContradictionsAreRefused) {
  EXPECT_THROW(launch_with({{"RANK", "4"}, {"WORLD_SIZE", "4"}}), OptionError);
  EXPECT_THROW(launch_with({{"RANK", "x"}, {"WORLD_SIZE", "4"}}), OptionError);
}

TEST(Launch, TheCommandToTypeIsQuotedForAShell) {
  EXPECT_EQ(command_with_ranks(4, "build/espalier", {"train", "--dp", "4", "--out", "my model", "it's"}),
            "torchrun --nproc-per-node 4 --no-python build/espalier train --dp 4 --out 'my model' 'it'\\''s'");
}

}  // namespace
}  // namespace espalier
