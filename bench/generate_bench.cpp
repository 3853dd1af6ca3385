// Sampling with the prompt shared by its responses beside the same with the prompt computed and held for each of them.
//
//   generate_bench [rounds 5] [prompts 4] [n 8] [prompt tokens 512] [response tokens 64] [layers 8] [width 512]
//
// The two take turns and give the same tokens. One JSON object: seconds unshared over shared, tokens a second of the
// responses (all seconds counted), and the bytes of keys and values.
#include <cstdio>
#include <string>

#include "bench/spread.h"
#include "espalier/base/random.h"
#include "espalier/generate/sampler.h"
#include "espalier/mixers/attention/shape.h"
#include "espalier/state/model_state.h"

namespace {

using namespace espalier;

ModelShape make_shape(std::int64_t layers, std::int64_t width) {
  ModelShape shape;
  shape.architecture = "LlamaForCausalLM";
  const std::int64_t heads = width / 64;
  shape.hidden = width;
  shape.layer = attention_layers(
      layers, {.heads = heads, .kv_heads = std::max<std::int64_t>(1, heads / 4), .head_dim = 64}, 3 * width);
  shape.vocabulary = 16384, shape.max_positions = 1 << 20, shape.tied_head = true;
  return shape;
}

struct Runs {
  std::vector<double> seconds, prompt_seconds, decode_seconds;
  GenerateReport report;
};

std::vector<Rollout> run(const ModelState& model, std::span<const Prompt> prompts, const SamplingSettings& settings,
                         Runs& runs) {
  Arena arena(std::int64_t{8} << 30);
  NoProgress progress;
  Generated generated;
  runs.seconds.push_back(
      bench::seconds_of([&] { generated = generate(model.decoder, prompts, settings, arena, progress); }));
  runs.report = generated.report;
  runs.prompt_seconds.push_back(runs.report.seconds_prompt);
  runs.decode_seconds.push_back(runs.report.seconds_decode);
  return std::move(generated.rollouts);
}

void print_runs(const char* name, const Runs& runs) {
  std::printf(
      ",\n \"%s\": {\"tokens_per_second\": %.4g, \"prompt_seconds\": %.4g, \"decode_seconds\": %.4g, "
      "\"prompt_rows\": %lld, \"kv_bytes\": %lld}",
      name, static_cast<double>(runs.report.response_tokens) / bench::median(runs.seconds),
      bench::median(runs.prompt_seconds), bench::median(runs.decode_seconds),
      static_cast<long long>(runs.report.prompt_rows_physical), static_cast<long long>(runs.report.kv_bytes));
}

}  // namespace

int main(int argc, char** argv) {
  const auto argument = [&](int i, std::int64_t otherwise) { return argc > i ? std::stoll(argv[i]) : otherwise; };
  const std::int64_t rounds = argument(1, 5), prompts = argument(2, 4), prompt_tokens = argument(4, 512);
  SamplingSettings shared;
  shared.n = argument(3, 8), shared.max_response_length = argument(5, 64);
  SamplingSettings unshared = shared;
  unshared.share_prompts = false;
  const auto model = random_model(make_shape(argument(6, 8), argument(7, 512)), DType::float32, 1);
  Random random(2);
  std::vector<Prompt> asked(static_cast<std::size_t>(prompts));
  for (Prompt& prompt : asked)
    for (std::int64_t i = 0; i < prompt_tokens; ++i)
      prompt.ids.push_back(static_cast<std::int32_t>(random.integer(0, model->shape.vocabulary - 1)));
  model->decoder.reserve_positions(positions_needed(model->shape, asked, shared));

  Runs warm, with, without;
  bool equal = true;
  run(*model, asked, shared, warm);
  for (std::int64_t round = 0; round < rounds; ++round) {
    const auto a = run(*model, asked, shared, with), b = run(*model, asked, unshared, without);
    for (std::size_t i = 0; i < a.size(); ++i) equal &= a[i].response_ids == b[i].response_ids;
  }
  std::printf(
      "{\"prompts\": %lld, \"n\": %lld, \"prompt_tokens\": %lld, \"response_tokens\": %lld, \"same_tokens\": %s,\n ",
      static_cast<long long>(prompts), static_cast<long long>(shared.n), static_cast<long long>(prompt_tokens),
      static_cast<long long>(shared.max_response_length), equal ? "true" : "false");
  bench::print_spread("speedup", bench::ratios(without.seconds, with.seconds));
  std::printf(",\n ");
  bench::print_spread("decode_speedup", bench::ratios(without.decode_seconds, with.decode_seconds));
  print_runs("shared", with);
  print_runs("unshared", without);
  std::printf("}\n");
}
