// Machines that are not there: rates by name as docs/machines.md has them, profiles from files, plans that do not fit.
#include "espalier/forecast/planned_machine.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "espalier/base/error.h"
#include "espalier/base/json.h"
#include "espalier/plan/planner.h"
#include "tests/support/source_dir.h"
#include "tests/unit/plan/shapes.h"

namespace espalier {
namespace {

// The numbers of a machine's row in the document: FLOP/s by dtype, B/s, GiB, host B/s, attention's FLOP/s by kernels.
std::vector<double> documented(const std::string& name) {
  std::ifstream in(testing::source_dir() + "/docs/machines.md");
  std::vector<double> numbers;
  for (std::string line; std::getline(in, line);) {
    if (line.find("| `" + name + "` |") != 0) continue;
    std::istringstream cells(line.substr(name.size() + 6));
    for (std::string cell; std::getline(cells, cell, '|');) numbers.push_back(std::stod(cell));
  }
  return numbers;
}

TEST(PlannedMachine, HasTheRatesOfItsDocument) {
  constexpr DType kDTypes[] = {DType::bfloat16, DType::float32, DType::float64};
  for (const char* name : {"h100", "h200", "a100"}) {
    const std::vector<double> row = documented(name);
    ASSERT_EQ(row.size(), 9u) << name;
    for (std::size_t i = 0; i < 3; ++i) {
      const MachineProfile machine = planned_machine(name, kDTypes[i]);
      EXPECT_EQ(machine.device, "cuda");
      EXPECT_EQ(machine.memory_bytes, static_cast<std::int64_t>(row[4]) << 30);
      EXPECT_NEAR(machine.bytes_per_second, 0.9 * row[3], 1);
      EXPECT_NEAR(machine.spill_bytes_per_second, 0.9 * row[5], 1);
      const double peak = 0.8 * row[i];
      EXPECT_NEAR(machine.attention_flops_per_second, i == 0 ? std::max(row[7], row[8]) : 0.5 * peak, 1) << i;
      // Reading the weights adds to multiplying: little at many rows, nearly everything at one.
      EXPECT_LT(machine.matrix.back().flops_per_second, peak);
      EXPECT_GT(machine.matrix.back().flops_per_second, 0.95 * peak);
      const double one = 2 * machine.bytes_per_second / static_cast<double>(bytes_of(kDTypes[i]));
      EXPECT_LT(machine.matrix.front().flops_per_second, one);
      EXPECT_GT(machine.matrix.front().flops_per_second, 0.8 * one);
    }
  }
}

// A plan must not promise the rate of kernels that do not run.
TEST(PlannedMachine, AttentionHasTheRateOfItsKernels) {
  constexpr AttentionKernels kKernels[] = {AttentionKernels::own, AttentionKernels::flash, AttentionKernels::cudnn};
  for (const char* name : {"h100", "h200", "a100"}) {
    const std::vector<double> row = documented(name);
    for (std::size_t i = 0; i < 3; ++i) {
      const double rate = row.at(6 + i);
      if (rate == 0) {
        EXPECT_THROW(planned_machine(name, DType::bfloat16, kKernels[i]), OptionError) << name;
        continue;
      }
      const MachineProfile machine = planned_machine(name, DType::bfloat16, kKernels[i]);
      EXPECT_NEAR(machine.attention_flops_per_second, rate, 1) << name;
      EXPECT_EQ(machine.attention_kernels, kKernels[i]) << name;
    }
    if (row[8] == 0)
      EXPECT_THROW(planned_machine(name, DType::bfloat16, AttentionKernels::hopper), OptionError) << name;
    else
      EXPECT_NEAR(planned_machine(name, DType::bfloat16, AttentionKernels::hopper).attention_flops_per_second, row[6],
                  1)
          << name;
    EXPECT_EQ(planned_machine(name, DType::bfloat16).attention_kernels,
              row[8] > row[7] ? AttentionKernels::cudnn : AttentionKernels::flash);
    EXPECT_EQ(planned_machine(name, DType::float32).attention_kernels, AttentionKernels::own);
    EXPECT_LT(row[6], std::max(row[7], row[8])) << "own kernels are not taken where faster ones are there";
  }
}

class ProfileFile : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() / ("espalier-profile-" + std::to_string(getpid()));
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string put(const std::string& name, const std::string& text) const {
    std::ofstream(folder_ / name) << text;
    return (folder_ / name).string();
  }
  std::filesystem::path folder_;
};

constexpr const char* kToml =
    "name = 'a workstation'\nsource = 'measured'\ndtype = 'float32'\nbytes_per_second = 6e10\n"
    "matrix = [{rows = 1, flops_per_second = 4e9}, {rows = 64, flops_per_second = 3e11}]\n"
    "attention_flops_per_second = 8e11\nseconds_per_call = 4e-6\n";

TEST_F(ProfileFile, IsJsonOrToml) {
  const MachineProfile known = planned_machine("h200", DType::bfloat16);
  const std::string json = put("h200.json", to_json(known).dump());
  EXPECT_EQ(to_json(planned_machine(json, DType::bfloat16)), to_json(known));
  const MachineProfile read = planned_machine(put("machine.toml", kToml), DType::float32);
  EXPECT_EQ(read.name, "a workstation");
  EXPECT_EQ(read.device, "cpu");
  EXPECT_EQ(read.memory_bytes, 0);
  EXPECT_EQ(read.fit.products, 1);
  EXPECT_EQ(read.matrix[1].flops_per_second, 3e11);
}

TEST_F(ProfileFile, BadOnesAreNamed) {
  EXPECT_THROW(planned_machine("b300", DType::float32), OptionError);
  EXPECT_THROW(planned_machine("", DType::float32), OptionError);
  EXPECT_THROW(planned_machine(folder_.string(), DType::float32), OptionError);
  EXPECT_THROW(planned_machine(put("machine.toml", kToml), DType::bfloat16), OptionError);
  EXPECT_THROW(
      planned_machine(put("kernels.toml", std::string(kToml) + "attention_kernels = 'auto'\n"), DType::float32),
      InputError);
  for (const char* bad : {"", "[]", "{}", "{", "{\"name\": 3}"})
    EXPECT_THROW(planned_machine(put("bad.json", bad), DType::float32), InputError) << bad;
  EXPECT_THROW(planned_machine(put("bad.toml", "name ="), DType::float32), InputError);
  for (const char* line : {"device = 'tpu'\n", "memory_bytes = -1\n", "memory_bytes = 'much'\n"})
    EXPECT_THROW(planned_machine(put("bad.toml", std::string(kToml) + line), DType::float32), InputError) << line;
}

// 8 billion parameters with their optimizer are 18 bytes each: 144 GB fit no 79 GiB.
TEST(Plan, ThatDoesNotFitIsMadeWhereItNeedNot) {
  const std::vector<Rollout> batch = testing::group_of(3000, 500, 8);
  const MachineProfile h100 = planned_machine("h100", DType::bfloat16);
  PlanOptions options;
  options.dtype = DType::bfloat16, options.memory_budget = h100.memory_bytes, options.setting.device.cuda = true;
  const auto plan = [&](const ModelShape& shape) {
    return make_plan(batch, build_prefix_trees(batch, ShareMode::whole_trees), shape, options, h100);
  };
  EXPECT_THROW(plan(testing::llama_3_8b()), MemoryBudgetError);
  options.must_fit = false;
  const StepPlan large = plan(testing::llama_3_8b());
  EXPECT_FALSE(large.chosen.fits);
  EXPECT_EQ(large.missing_bytes, large.chosen.bytes.peak() - h100.memory_bytes);
  EXPECT_GT(large.missing_bytes, std::int64_t{55} << 30);
  EXPECT_NE(large.remedy.find("--memory-budget"), std::string::npos);
  EXPECT_EQ(large.logical_rows, 8 * 3500);
  const StepPlan small = plan(testing::tiny_shape());
  EXPECT_TRUE(small.chosen.fits);
  EXPECT_EQ(small.missing_bytes, 0);
  EXPECT_EQ(small.remedy, "");
}

}  // namespace
}  // namespace espalier
