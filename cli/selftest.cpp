// `selftest`: every operation of the device against the CPU's answer in float64, and that it gives the same bits twice;
// then how fast the large ones run. An interrupted run tells the checks that it has done.
#include <algorithm>
#include <iomanip>
#include <map>
#include <sstream>

#include "cli/verbs.h"
#include "espalier/device/cuda_library.h"
#include "espalier/device/device.h"
#include "espalier/measure/gpu_profile.h"
#include "espalier/selftest/attention_rates.h"
#include "espalier/selftest/large_attention.h"
#include "espalier/selftest/operation_check.h"
#include "espalier/selftest/operation_rates.h"

namespace espalier::cli {
namespace {

struct Tally {
  std::int64_t cases = 0, failed = 0;
  double worst = 0;  // error in parts of what is allowed
};

std::string text_of_check(const OperationCheck& check) {
  std::ostringstream out;
  out << check.operation << " (" << check.sizes << ", " << name_of(check.dtype) << "): ";
  if (!check.same_bits) out << "other bits the second time; ";
  out << "off by " << std::setprecision(2) << check.error << ", allowed " << check.allowed;
  return out.str();
}

Json json_of(const OperationCheck& check) {
  return {{"operation", check.operation}, {"sizes", check.sizes},     {"dtype", name_of(check.dtype)},
          {"error", check.error},         {"allowed", check.allowed}, {"same_bits", check.same_bits},
          {"pass", check.pass()}};
}

void print_table(std::ostream& out, const std::map<std::string, Tally>& tallies) {
  out << std::left << std::setw(42) << "operation" << std::right << std::setw(7) << "checks" << std::setw(8) << "failed"
      << std::setw(22) << "worst error/allowed" << '\n';
  for (const auto& [operation, tally] : tallies)
    out << std::left << std::setw(42) << operation << std::right << std::setw(7) << tally.cases << std::setw(8)
        << tally.failed << std::setw(22) << std::setprecision(2) << std::fixed << tally.worst << '\n';
}

Json json_of(const OperationRate& rate) {
  return {{"operation", rate.operation},
          {"rows", rate.rows},
          {"seconds", rate.seconds},
          {"bytes_per_second", rate.bytes > 0 ? Json(rate.bytes_per_second()) : Json(nullptr)},
          {"flops_per_second", rate.flops > 0 ? Json(rate.flops_per_second()) : Json(nullptr)}};
}

Json json_of(const AttentionRate& rate) {
  return {{"shape", rate.shape},
          {"heads", rate.heads},
          {"kv_heads", rate.kv_heads},
          {"head_dim", rate.head_dim},
          {"value_dim", rate.value_dim},
          {"rows", rate.rows},
          {"path_rows", rate.path_rows},
          {"branch_rows", rate.branch_rows},
          {"forward",
           {{"seconds", rate.forward_seconds}, {"flops_per_second", rate.forward_flops() / rate.forward_seconds}}},
          {"backward",
           {{"seconds", rate.backward_seconds}, {"flops_per_second", rate.backward_flops() / rate.backward_seconds}}}};
}

void print_rates(std::ostream& out, const std::vector<AttentionRate>& rates) {
  out << '\n'
      << std::left << std::setw(42) << "attention in bfloat16" << std::right << std::setw(7) << "rows" << std::setw(12)
      << "path" << std::setw(10) << "forward" << std::setw(20) << "backward, GFLOP/s" << '\n';
  for (const AttentionRate& rate : rates)
    out << std::left << std::setw(42) << rate.shape << std::right << std::setw(7) << rate.rows << std::setw(12)
        << rate.path_rows << std::setprecision(0) << std::setw(10) << 1e-9 * rate.forward_flops() / rate.forward_seconds
        << std::setw(20) << 1e-9 * rate.backward_flops() / rate.backward_seconds << '\n';
}

void print_rates(std::ostream& out, const std::vector<OperationRate>& rates) {
  out << '\n'
      << std::left << std::setw(42) << "bfloat16" << std::right << std::setw(7) << "rows" << std::setw(12) << "ms"
      << std::setw(10) << "GB/s" << std::setw(12) << "GFLOP/s" << '\n';
  for (const OperationRate& rate : rates) {
    out << std::left << std::setw(42) << rate.operation << std::right << std::setw(7) << rate.rows << std::setw(12)
        << std::setprecision(3) << 1e3 * rate.seconds << std::setprecision(0) << std::setw(10);
    rate.bytes > 0 ? out << 1e-9 * rate.bytes_per_second() : out << "-";
    rate.flops > 0 ? out << std::setw(12) << 1e-9 * rate.flops_per_second() : out << std::setw(12) << "-";
    out << '\n';
  }
}

}  // namespace

int run_selftest(Context& context) {
  Device& device = bound_device();
  const std::string& only = context.options.only;
  std::vector<OperationCase> cases = all_operation_cases();
  std::erase_if(cases, [&](const OperationCase& each) { return each.operation.find(only) == std::string::npos; });
  if (cases.empty())
    throw OptionError({"--only", "a text that occurs in the name of an operation", only,
                       "`espalier selftest` without --only lists the operations"});
  if (auto* const try_chunks = device.operations().without_chunks)
    if (const std::string& why = try_chunks(); !why.empty())
      context.progress.note("recurrent layers run row by row, not in chunks: " + why);
  std::map<std::string, Tally> tallies;
  context.result["checks"] = Json::array();
  std::vector<std::string> failures;
  const double start = device.seconds();
  std::int64_t done = 0;
  const auto add = [&](const OperationCheck& check) {
    Tally& tally = tallies[check.operation];
    ++tally.cases;
    tally.failed += check.pass() ? 0 : 1;
    if (check.error > 0) tally.worst = std::max(tally.worst, check.error / check.allowed);
    if (!check.pass()) failures.push_back(text_of_check(check));
    context.result["checks"].push_back(json_of(check));
  };
  context.progress.begin("operations", static_cast<std::int64_t>(cases.size()), "cases");
  for (const OperationCase& each : cases) {
    for (const DType dtype : {DType::float64, DType::float32, DType::bfloat16})
      add(check_operation(device, each, dtype));
    context.progress.advance_to(++done);
  }
  context.progress.end();
  if (only.empty() || std::string_view("attention").find(only) != std::string_view::npos)
    for (const OperationCheck& check : check_large_attention(device)) add(check);
  std::vector<OperationRate> rates;
  if (only.empty()) rates = measure_operation_rates(device, DType::bfloat16, context.progress);
  Json told = Json::array();
  for (const OperationRate& rate : rates) told.push_back(json_of(rate));
  context.result["rates"] = told;
  std::vector<AttentionRate> attention;
  if (only.empty() || only == "attention") attention = measure_attention_rates(device, context.progress);
  Json of_attention = Json::array();
  for (const AttentionRate& rate : attention) of_attention.push_back(json_of(rate));
  const double seconds = device.seconds() - start;
  context.result["verdict"] = failures.empty() ? "pass" : "fail";
  context.result["attention_rates"] = of_attention;
  if (only.empty()) {
    MachineProfile profile = profile_of_rates(device, DType::bfloat16, rates);
    if (const OpenedGpu& gpu = opened_gpu(); !gpu.name.empty()) {
      profile.name = text_of(gpu.name, ", attention ", name_of(gpu.attention));
      profile.attention_kernels = gpu.attention;
      if (keep_gpu_profile(profile, gpu)) context.progress.note("its rates are kept for plans on this GPU");
    }
    context.result["profile"] = to_json(profile);
  }
  context.result["self_test_seconds"] = seconds;
  print_table(context.text, tallies);
  if (!rates.empty()) print_rates(context.text, rates);
  if (!attention.empty()) print_rates(context.text, attention);
  for (const std::string& failure : failures) context.text << "  " << failure << '\n';
  context.text << (failures.empty() ? "PASS" : "FAIL") << ": " << context.result["checks"].size() << " checks of "
               << tallies.size() << " operations on " << device.name() << " against the CPU in float64, "
               << std::setprecision(1) << seconds << " s\n";
  return failures.empty() ? 0 : kFailedVerification;
}

}  // namespace espalier::cli
