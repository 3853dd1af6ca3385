#include "espalier/measure/gpu_profile.h"

#include <fstream>
#include <sstream>

#include "espalier/base/error.h"
#include "espalier/base/json.h"
#include "espalier/forecast/planned_machine.h"
#include "espalier/measure/profile_cache.h"

namespace espalier {
namespace {

std::filesystem::path file_of(const OpenedGpu& gpu, DType dtype) {
  return cache_file(
      text_of("gpu-", kProfileVersion, "-", file_word(gpu.name), "-", name_of(dtype), "-", name_of(gpu.attention)));
}

}  // namespace

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
  MachineProfile profile = kept ? *std::move(kept) : planned_machine(published, dtype, gpu.attention);
  profile.attention_kernels = gpu.attention;
  return profile;
}

AttentionKernels fastest_attention(const std::string& gpu) {
  AttentionKernels fastest = AttentionKernels::automatic;
  double best = 0;
  int compared = 0;
  for (std::size_t each = 1; each < words_of(AttentionKernels{}).size(); ++each) {
    const auto by = static_cast<AttentionKernels>(each);
    const std::optional<MachineProfile> kept = kept_gpu_profile({gpu, by}, DType::bfloat16);
    if (!kept) continue;
    ++compared;
    if (kept->attention_flops_per_second > best) best = kept->attention_flops_per_second, fastest = by;
  }
  return compared > 1 ? fastest : AttentionKernels::automatic;
}

}  // namespace espalier
