// The kept profile of a GPU, and the attention that it leads to.
#include "espalier/measure/gpu_profile.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "espalier/forecast/planned_machine.h"

namespace espalier {
namespace {

class GpuProfile : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() / ("espalier-gpu-profile-" + std::to_string(getpid()));
    if (const char* const former = std::getenv("XDG_CACHE_HOME")) former_ = former;
    setenv("XDG_CACHE_HOME", folder_.c_str(), 1);
  }
  void TearDown() override {
    former_.empty() ? unsetenv("XDG_CACHE_HOME") : setenv("XDG_CACHE_HOME", former_.c_str(), 1);
    std::filesystem::remove_all(folder_);
  }
  static void keep(const OpenedGpu& gpu, double attention, DType dtype = DType::bfloat16) {
    MachineProfile profile = planned_machine("h100", dtype);
    profile.attention_flops_per_second = attention;
    ASSERT_TRUE(keep_gpu_profile(profile, gpu));
  }

  std::filesystem::path folder_;
  std::string former_;
};

TEST_F(GpuProfile, KernelsAreComparedOnceTwoWereMeasured) {
  const std::string gpu = "NVIDIA H100 80GB HBM3";
  EXPECT_EQ(fastest_attention(gpu), AttentionKernels::automatic);
  keep({gpu, AttentionKernels::own}, 2e14);
  EXPECT_EQ(fastest_attention(gpu), AttentionKernels::automatic)
      << "own kernels are no choice before others were timed";
  keep({gpu, AttentionKernels::flash}, 3e14);
  EXPECT_EQ(fastest_attention(gpu), AttentionKernels::flash);
  keep({gpu, AttentionKernels::cudnn}, 1e14);
  EXPECT_EQ(fastest_attention(gpu), AttentionKernels::flash);
  keep({gpu, AttentionKernels::own}, 4e14);
  EXPECT_EQ(fastest_attention(gpu), AttentionKernels::own);
  keep({gpu, AttentionKernels::hopper}, 5e14);
  EXPECT_EQ(fastest_attention(gpu), AttentionKernels::hopper) << "taken where they were measured";
  EXPECT_EQ(fastest_attention("NVIDIA H200"), AttentionKernels::automatic) << "another GPU";
}

TEST_F(GpuProfile, ARunPlansWithWhatWasMeasuredOfItsKernelsElseWithPublishedRates) {
  const OpenedGpu flash{"NVIDIA H100 80GB HBM3", AttentionKernels::flash}, own{flash.name, AttentionKernels::own};
  keep(flash, 123e12);
  EXPECT_EQ(gpu_profile(flash, DType::bfloat16).attention_flops_per_second, 123e12);
  const auto published = [](const char* machine, AttentionKernels kernels) {
    return planned_machine(machine, DType::bfloat16, kernels).attention_flops_per_second;
  };
  EXPECT_EQ(gpu_profile(own, DType::bfloat16).attention_flops_per_second, published("h100", AttentionKernels::own));
  EXPECT_EQ(gpu_profile(flash, DType::bfloat16).attention_kernels, AttentionKernels::flash)
      << "whose memory is planned";
  EXPECT_EQ(gpu_profile(own, DType::bfloat16).attention_kernels, AttentionKernels::own);
  const MachineProfile a100 = gpu_profile({"NVIDIA A100-SXM4-80GB", AttentionKernels::flash}, DType::bfloat16);
  EXPECT_EQ(a100.attention_flops_per_second, published("a100", AttentionKernels::flash));
  EXPECT_EQ(gpu_profile({"NVIDIA H200", AttentionKernels::cudnn}, DType::float32).memory_bytes,
            std::int64_t{139} << 30);
  for (const auto& entry : std::filesystem::directory_iterator(folder_ / "espalier"))
    std::ofstream(entry.path()) << "{";
  EXPECT_EQ(gpu_profile(flash, DType::bfloat16).attention_flops_per_second, published("h100", AttentionKernels::flash));
}

}  // namespace
}  // namespace espalier
