#include "espalier/measure/machine.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>

#include "espalier/base/defined_sums.h"
#include "espalier/base/error.h"
#include "espalier/base/json.h"
#include "espalier/device/cuda_library.h"
#include "espalier/device/device.h"
#include "espalier/device/scalar_type.h"
#include "espalier/machine/memory.h"
#include "espalier/measure/gpu_profile.h"
#include "espalier/measure/profile_cache.h"
#include "espalier/model/mixer_layer.h"
#include "espalier/ops/operations.h"
#include "espalier/saved/spill_file.h"

namespace espalier {
namespace {

// Least seconds of one call among a few, after one to warm up.
template <class Work>
double best_seconds(Work&& work) {
  work();
  double best = std::numeric_limits<double>::infinity();
  const auto start = std::chrono::steady_clock::now();
  for (int run = 0; run < 20; ++run) {
    const auto begin = std::chrono::steady_clock::now();
    work();
    const auto end = std::chrono::steady_clock::now();
    best = std::min(best, std::chrono::duration<double>(end - begin).count());
    if (run >= 2 && end - start > std::chrono::milliseconds(60)) break;
  }
  return best;
}

// One product as a layer makes it.
class Product {
 public:
  Product(std::int64_t rows, at::ScalarType dtype)
      : x_(at::ones({rows, kWidth}, dtype)), weight_(at::ones({kWidth, kWidth}, dtype)), out_(at::empty_like(x_)) {}

  void operator()() const { cpu_device().operations().linear(out_, x_, weight_, at::Tensor()); }
  double flops() const { return 2.0 * static_cast<double>(x_.size(0) * kWidth * kWidth); }

 private:
  static constexpr std::int64_t kWidth = 1024;
  at::Tensor x_, weight_, out_;
};

MachineProfile::Rate matrix_rate(std::int64_t rows, at::ScalarType dtype) {
  const Product product(rows, dtype);
  return {rows, product.flops() / best_seconds(product)};
}

// The rate of the gradient of a layer's square weights from many rows, as a backward adds it.
double weight_gradient_rate(at::ScalarType dtype, double columns) {
  constexpr std::int64_t kRows = MachineProfile::kGradientRows;
  const auto width = static_cast<std::int64_t>(columns);
  const at::Tensor x = at::ones({kRows, width}, dtype), grad = at::ones_like(x);
  const at::Tensor sum = at::zeros({width, width}, accumulator_type(dtype)), product = at::empty({width, width}, dtype);
  const Operations& ops = cpu_device().operations();
  return 2.0 * kRows * columns * columns /
         best_seconds([&] { ops.add_linear_grad_weight(sum, at::Tensor(), grad, x, product); });
}

double attention_rate(at::ScalarType dtype, double head_dim) {
  constexpr std::int64_t kRows = 1024, kHeads = 8, kKvHeads = 2;
  const auto D = static_cast<std::int64_t>(head_dim);
  const auto options = at::TensorOptions().dtype(dtype);
  const auto sums = at::TensorOptions().dtype(accumulator_type(dtype));
  const at::Tensor q = at::full({kRows, kHeads * D}, 0.01, options), k = at::full({kRows, kKvHeads * D}, 0.01, options);
  const at::Tensor out = at::empty_like(q), grad_q = at::empty_like(q), lse = at::empty({kHeads, kRows}, sums);
  const at::Tensor grad_k = at::zeros({kRows, kKvHeads * D}, sums), grad_v = at::zeros_like(grad_k);
  const at::Tensor subtree_end = at::full({kRows}, kRows, at::kInt);
  const AttentionProblem problem{D, q, k, k, k, k, at::Tensor(), subtree_end};
  const Operations& ops = cpu_device().operations();
  double seconds = best_seconds([&] { ops.attention(problem, out, lse); });
  seconds += best_seconds([&] {
    ops.add_attention_backward(problem, out, lse, q, {grad_q, grad_k, grad_v, grad_k, grad_v});
  });
  constexpr double kPairs = kRows * kRows + kRows * (kRows + 1) / 2.0;
  return 3.5 * 4.0 * kHeads * head_dim * kPairs / seconds;
}

double copy_rate() {
  const at::Tensor from = at::ones({16 << 20});
  at::Tensor to = at::empty_like(from);
  return 2.0 * static_cast<double>(from.nbytes()) / best_seconds([&] { to.copy_(from); });
}

double call_seconds(at::ScalarType dtype) {
  const auto options = at::TensorOptions().dtype(dtype);
  const at::Tensor x = at::ones({1, 8}, options);
  const at::Tensor out = at::empty({1, 8}, options);
  const at::Tensor weight = at::ones({8, 8}, options);
  constexpr int kCalls = 200;
  const Operations& ops = cpu_device().operations();
  return best_seconds([&] {
           for (int i = 0; i < kCalls; ++i) ops.linear(out, x, weight, at::Tensor());
         }) /
         kCalls;
}

std::string cpu_name() {
  std::ifstream info("/proc/cpuinfo");
  std::string line;
  while (std::getline(info, line))
    if (line.starts_with("model name")) break;
  const std::string name = file_word(std::string_view(line).substr(std::min(line.find(':') + 1, line.size())));
  return name.empty() ? "cpu" : name;
}

std::filesystem::path file_of_cpu(DType dtype) {
  return cache_file(text_of("machine-", kProfileVersion, "-", cpu_name(), "-", name_of(dtype), "-",
                            at::get_num_threads(), defined_sums() ? "-own" : "-library"));
}

// The cache file for the file system of --spill-dir: empty where nothing can be offloaded there, or nothing kept.
std::filesystem::path disk_cache_file(const std::filesystem::path& folder) {
  struct stat status {};
  std::error_code ignored;
  const std::filesystem::path place = folder.empty() ? std::filesystem::temp_directory_path(ignored) : folder;
  if (room_to_spill(folder) == 0 || ::stat(place.c_str(), &status) != 0) return {};
  return cache_file(text_of("disk-", kProfileVersion, "-", status.st_dev));
}

// A disk's cached rate. Without one the rate is measured and kept or, where that cannot be, stays as it is stated.
double spill_rate(const Options& options, double stated, Progress& progress) {
  const std::filesystem::path file = disk_cache_file(options.spill_dir);
  if (file.empty()) return stated;
  try {
    if (std::ifstream in(file); in) return Json::parse(in).at("bytes_per_second").get<double>();
    if (!can_write_cache(file)) return stated;
    progress.note("measuring the disk of --spill-dir once, less than a second");
    const double rate = spill_bytes_per_second(options.spill_dir);
    write_cache(file, {{"folder", options.spill_dir}, {"bytes_per_second", rate}});
    return rate;
  } catch (const nlohmann::json::exception&) {
    return stated;
  } catch (const OptionError&) {  // a folder that takes nothing: storing there reports it
    return stated;
  }
}

// Cached, or measured and cached; nothing of its disks.
MachineProfile profile_without_disk(const Options& options, Progress& progress) {
  const DType dtype = options.dtype;
  if (const OpenedGpu& gpu = opened_gpu(); !gpu.name.empty() && options.device == DeviceType::cuda)
    return gpu_profile(gpu, dtype);
  const std::filesystem::path file = file_of_cpu(dtype);
  if (std::ifstream in(file); in) {
    std::stringstream text;
    text << in.rdbuf();
    try {
      MachineProfile profile = profile_of(Json::parse(text.str()), file.string());
      profile.threads = at::get_num_threads();
      return profile;
    } catch (const std::exception&) {
      progress.note(text_of(file.string(), " is damaged; measuring the machine again"));
    }
  }
  if (!can_write_cache(file)) return default_profile(options.device, dtype, at::get_num_threads());
  progress.note("measuring this machine once, a few seconds");
  const MachineProfile profile = measure_machine(dtype);
  keep_profile(profile);
  return profile;
}

}  // namespace

MachineProfile measure_machine(DType dtype) {
  const at::ScalarType scalar = scalar_type(dtype);
  MachineProfile profile;
  profile.name = cpu_name();
  profile.source = "measured";
  profile.dtype = dtype;
  profile.threads = at::get_num_threads();
  for (const std::int64_t rows : {1, 4, 16, 64, 256, 1024, 4096}) profile.matrix.push_back({rows, 0});
  profile.seconds_per_call = std::numeric_limits<double>::infinity();
  // Rounds apart in time: others who use the machine for a moment spoil one of them, not all.
  for (int round = 0; round < 3; ++round) {
    double best = 0;  // a rate that falls with more rows is noise
    for (MachineProfile::Rate& rate : profile.matrix) {
      best = std::max({best, rate.flops_per_second, matrix_rate(rate.rows, scalar).flops_per_second});
      rate.flops_per_second = best;
    }
    const auto raise = [](double& rate, double measured) { rate = std::max(rate, measured); };
    raise(profile.weight_gradient_flops_per_second, weight_gradient_rate(scalar, MachineProfile::kWideColumns));
    raise(profile.narrow_gradient_flops_per_second, weight_gradient_rate(scalar, MachineProfile::kNarrowColumns));
    // The head multiplies in the accumulator dtype.
    raise(profile.head_flops_per_second,
          matrix_rate(MachineProfile::kHeadRows, accumulator_type(scalar)).flops_per_second);
    raise(profile.attention_flops_per_second, attention_rate(scalar, MachineProfile::kWideHead));
    raise(profile.narrow_attention_flops_per_second, attention_rate(scalar, MachineProfile::kNarrowHead));
    for (const MixerKind kind : kMixerKinds)
      if (const auto rate = mixer_layer(kind).flops_per_second)
        raise(profile.row_flops_per_second[static_cast<std::size_t>(kind)], rate(scalar));
    profile.bytes_per_second = std::max(profile.bytes_per_second, copy_rate());
    profile.seconds_per_call = std::min(profile.seconds_per_call, call_seconds(scalar));
  }
  return_freed_memory();
  return profile;
}

MachineProfile machine_profile(const Options& options, Progress& progress) {
  MachineProfile profile = profile_without_disk(options, progress);
  profile.spill_bytes_per_second = spill_rate(options, profile.spill_bytes_per_second, progress);
  return profile;
}

MachineProfile machine_profile(const Options& options, Progress& progress, const Mesh& mesh) {
  if (mesh.world.size() == 1) return machine_profile(options, progress);
  const std::string own = mesh.world.rank() == 0 ? to_json(machine_profile(options, progress)).dump() : "";
  return profile_of(Json::parse(text_of_rank(mesh.world, own)), "the machine profile of rank 0");
}

MachineProfile current_machine_profile(const Options& options, Progress& progress) {
  constexpr double kFaster = 1.1;
  const MachineProfile profile = machine_profile(options, progress);
  if (profile.source != "measured") return profile;
  const double now = matrix_rate(kProductRows, scalar_type(profile.dtype)).flops_per_second;
  return_freed_memory();
  const double then = profile.matrix_flops_per_second(kProductRows);
  if (now <= kFaster * then) return profile;
  progress.note(text_of("matrix products run at ", std::llround(now / 1e9), " GFLOP/s, at ", std::llround(then / 1e9),
                        " when this machine was measured: measuring it again"));
  MachineProfile again = measure_machine(profile.dtype);
  again.spill_bytes_per_second = profile.spill_bytes_per_second;
  keep_profile(again);
  return again;
}

double product_flops_per_second(DType dtype) {
  double flops = 0, seconds = 0;
  {
    const Product product(kProductRows, scalar_type(dtype));
    product();
    const auto begin = std::chrono::steady_clock::now();
    while (seconds < 0.05) {
      product();
      flops += product.flops();
      seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    }
  }
  return_freed_memory();
  return flops / seconds;
}

bool keep_profile(const MachineProfile& profile) { return write_cache(file_of_cpu(profile.dtype), to_json(profile)); }

}  // namespace espalier
