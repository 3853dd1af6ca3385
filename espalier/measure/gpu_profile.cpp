#include "espalier/measure/gpu_profile.h"

#include <array>
#include <fstream>
#include <sstream>

#include "espalier/base/error.h"
#include "espalier/base/json.h"
#include "espalier/forecast/planned_machine.h"
#include "espalier/measure/profile_cache.h"

namespace espalier {
namespace {

constexpr std::array<std::pair<AttentionBy, AttentionKernels>, 4> kKernels = {
    {{AttentionBy::own, AttentionKernels::own},
     {AttentionBy::flash, AttentionKernels::flash},
     {AttentionBy::cudnn, AttentionKernels::cudnn},
     {AttentionBy::hopper, AttentionKernels::hopper}}};

std::filesystem::path file_of(const OpenedGpu& gpu, DType dtype) {
  return cache_file(
      text_of("gpu-", kProfileVersion, "-", file_word(gpu.name), "-", name_of(dtype), "-", name_of(gpu.attention)));
}

}  // namespace

AttentionKernels kernels_of(AttentionBy attention) {
  for (const auto& [by, kernels] : kKernels)
    if (by == attention) return kernels;
  return AttentionKernels::automatic;
}

bool keep_gpu_profile(const MachineProfile& profile, const OpenedGpu& gpu) {
  return write_cache(file_of(gpu, profile.dtype), to_json(profile));
}

std::optional<MachineProfile> kept_gpu_profile(const OpenedGpu& gpu, DType dtype) {
  const std::filesystem::path file = file_of(gpu, dtype);
  std::ifstream in(file);
  if (!in) return std::nullopt;
  std::stringstream text;
  text << in.rdbuf();
  try {
    return profile_of(Json::parse(text.str()), file.string());
  } catch (const std::exception&) {  // damaged: as if there were none
    return std::nullopt;
  }
}

MachineProfile gpu_profile(const OpenedGpu& gpu, DType dtype) {
  std::optional<MachineProfile> kept = kept_gpu_profile(gpu, dtype);
  const auto named = [&](const char* word) { return gpu.name.find(word) != std::string::npos; };
  const char* const published = named("H200") ? "h200" : named("A100") ? "a100" : "h100";
  MachineProfile profile = kept ? *std::move(kept) : planned_machine(published, dtype, kernels_of(gpu.attention));
  profile.attention_kernels = kernels_of(gpu.attention);
  return profile;
}

AttentionBy fastest_attention(const std::string& gpu) {
  AttentionBy fastest = AttentionBy::automatic;
  double best = 0;
  int compared = 0;
  for (const auto& [by, kernels] : kKernels) {
    const std::optional<MachineProfile> kept = kept_gpu_profile({gpu, by}, DType::bfloat16);
    if (!kept) continue;
    ++compared;
    if (kept->attention_flops_per_second > best) best = kept->attention_flops_per_second, fastest = by;
  }
  return compared > 1 ? fastest : AttentionBy::automatic;
}

}  // namespace espalier
