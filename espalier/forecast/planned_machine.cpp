// Rates by name. A GPU's matrix product of r rows reads the weights once and multiplies:
//   seconds = bytes of the weights / bandwidth + FLOPs / rate    so that    rate(r) = 1 / (b / (2 r bandwidth) + 1 /
//   rate)
// for each of the weights, of b bytes: few rows are bound by memory, many by the units.
#include "espalier/forecast/planned_machine.h"

#include <toml++/toml.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <sstream>
#include <utility>

#include "espalier/base/error.h"
#include "espalier/base/json.h"

namespace espalier {
namespace {

// Published peaks and measured rates; sources in docs/machines.md, which a test compares with this table.
struct Gpu {
  const char* name;
  const char* title;
  double bfloat16, float32, float64;  // FLOP/s of matrix products
  double bytes_per_second;
  std::int64_t memory_bytes;
  double host_bytes_per_second;  // to the host's memory and back, each way
  double link, network;          // that one GPU sends, to a neighbour and to another machine
  int capability;                // ten times the compute capability
  // FLOP/s of attention, forward and backward together in bfloat16; kernels without a rate were not measured there.
  std::initializer_list<std::pair<AttentionKernels, double>> attention;
};
constexpr auto kHopperAttention = {std::pair{AttentionKernels::own, 220e12}, std::pair{AttentionKernels::flash, 168e12},
                                   std::pair{AttentionKernels::cudnn, 300e12}};
constexpr auto kAmpereAttention = {std::pair{AttentionKernels::own, 100e12},
                                   std::pair{AttentionKernels::flash, 180e12}};
constexpr Gpu kGpus[] = {
    {"h100", "NVIDIA H100 SXM", 989e12, 67e12, 67e12, 3.35e12, std::int64_t{79} << 30, 64e9, 450e9, 50e9, 90,
     kHopperAttention},
    {"h200", "NVIDIA H200 SXM", 989e12, 67e12, 67e12, 4.8e12, std::int64_t{139} << 30, 64e9, 450e9, 50e9, 90,
     kHopperAttention},
    {"a100", "NVIDIA A100 SXM 80 GB", 312e12, 19.5e12, 19.5e12, 2.04e12, std::int64_t{79} << 30, 32e9, 300e9, 25e9, 80,
     kAmpereAttention},
};
// Large products and copies reach this part of the peaks: measured on an H200, 790 TFLOP/s and 4.3 TB/s.
constexpr double kReachedFlops = 0.8, kReachedBytes = 0.9;
constexpr double kReachedLink = 0.8;  // of a link's peak by large collectives; round, not measured
// Attention in float32 and float64 has no published rate: half of what products reach.
constexpr double kPlainAttention = 0.5;
constexpr double kLaunchSeconds = 4e-6;

bool runs(const Gpu& gpu, AttentionKernels kernels) { return row_of(kernels).run_on(gpu.capability); }

// As a run takes them where nothing was measured (ops/cuda/library.cpp).
AttentionKernels kernels_on(const Gpu& gpu, AttentionKernels asked) {
  if (asked != AttentionKernels::automatic) {
    if (!runs(gpu, asked))
      throw OptionError({"--attention", text_of("own or flash on an ", gpu.title),
                         text_of(name_of(asked), ", kernels of compute capability ", row_of(asked).capability / 10, ".",
                                 row_of(asked).capability % 10),
                         "leave it out"});
    return asked;
  }
  for (const AttentionKernels each : tried_in_order())
    if (runs(gpu, each)) return each;
  return AttentionKernels::own;
}

// Kernels without a rate are taken to be no slower than the own ones.
double attention_rate(const Gpu& gpu, AttentionKernels kernels) {
  double own = 0;
  for (const auto& [each, rate] : gpu.attention) {
    if (each == kernels) return rate;
    if (each == AttentionKernels::own) own = rate;
  }
  return own;
}

MachineProfile profile_of_gpu(const Gpu& gpu, DType dtype, AttentionKernels asked) {
  const double peak = dtype == DType::bfloat16 ? gpu.bfloat16 : dtype == DType::float32 ? gpu.float32 : gpu.float64;
  MachineProfile profile;
  profile.name = gpu.title;
  profile.source = "published";
  profile.device = "cuda";
  profile.dtype = dtype;
  profile.bytes_per_second = kReachedBytes * gpu.bytes_per_second;
  for (std::int64_t rows = 1; rows <= 8192; rows *= rows < 64 ? 4 : 2) {
    const double reading =
        static_cast<double>(bytes_of(dtype)) / (2 * static_cast<double>(rows) * profile.bytes_per_second);
    profile.matrix.push_back({rows, 1 / (reading + 1 / (kReachedFlops * peak))});
  }
  profile.attention_flops_per_second = kPlainAttention * kReachedFlops * peak;
  if (const AttentionKernels kernels = kernels_on(gpu, asked); dtype == DType::bfloat16) {
    profile.attention_flops_per_second = attention_rate(gpu, kernels);
    profile.attention_kernels = kernels;
  }
  profile.seconds_per_call = kLaunchSeconds;
  profile.spill_bytes_per_second = kReachedBytes * gpu.host_bytes_per_second;
  profile.memory_bytes = gpu.memory_bytes;
  profile.link_bytes_per_second = kReachedLink * gpu.link;
  profile.network_bytes_per_second = kReachedLink * gpu.network;
  return profile;
}

Json read_profile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  try {
    if (!path.ends_with(".toml")) return Json::parse(text.str());
    std::ostringstream json;
    json << toml::json_formatter(toml::parse(text.str(), path));
    return Json::parse(json.str());
  } catch (const nlohmann::json::exception& problem) {
    throw InputError({path, "a machine profile in JSON", problem.what(), ""});
  } catch (const toml::parse_error& problem) {
    throw InputError({path, "a machine profile in TOML", std::string(problem.description()), ""});
  }
}

}  // namespace

MachineProfile planned_machine(const std::string& machine, DType dtype, Choice<AttentionKernels> attention) {
  std::string names;
  for (const Gpu& gpu : kGpus) {
    if (machine == gpu.name) return profile_of_gpu(gpu, dtype, attention);
    names += text_of(gpu.name, ", ");
  }
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(machine, ignored))
    throw OptionError({"--machine", text_of(names, "or a file with a profile"), "'" + machine + "'",
                       "give one of these names, or the path of a profile; espalier keeps the profile of this machine "
                       "in ~/.cache/espalier"});
  MachineProfile profile = profile_of(read_profile(machine), machine);
  if (profile.dtype != dtype)
    throw OptionError({"--machine", text_of("rates of ", name_of(dtype), ", the --dtype of this plan"),
                       text_of(machine, " has rates of ", name_of(profile.dtype)),
                       text_of("take --dtype ", name_of(profile.dtype), ", or another profile")});
  return profile;
}

}  // namespace espalier
