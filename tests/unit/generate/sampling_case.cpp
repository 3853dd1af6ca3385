#include "tests/unit/generate/sampling_case.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/mm.h>

#include "espalier/base/random.h"
#include "espalier/model/decoder_pass.h"
#include "espalier/model/path_source.h"

namespace espalier::testing {

std::vector<Prompt> make_prompts(const std::vector<std::int64_t>& lengths, std::int64_t vocabulary,
                                 std::uint64_t seed) {
  Random random(seed);
  std::vector<Prompt> prompts;
  for (const std::int64_t length : lengths) {
    Prompt prompt;
    for (std::int64_t i = 0; i < length; ++i)
      prompt.ids.push_back(static_cast<std::int32_t>(random.integer(0, vocabulary - 1)));
    prompt.where = "made.jsonl:" + std::to_string(prompts.size() + 1);
    prompts.push_back(prompt);
  }
  if (prompts.size() > 1 && lengths.back() == lengths.front()) prompts.back().ids = prompts.front().ids;
  return prompts;
}

Generated sample(ModelState& model, const std::vector<Prompt>& prompts, const SamplingSettings& settings) {
  model.decoder.reserve_positions(positions_needed(model.shape, prompts, settings));
  Arena arena(std::int64_t{1} << 30);
  NoProgress progress;
  return generate(model.decoder, prompts, settings, arena, progress);
}

at::Tensor dense_logits_TV(ModelState& model, const std::vector<std::int32_t>& ids) {
  Arena arena(std::int64_t{1} << 30);
  OpenPath path(model.shape, 0, model.decoder.dtype(), false, arena);
  model.decoder.reserve_positions(static_cast<std::int64_t>(ids.size()));
  ModelInput input;
  input.id = ids;
  for (std::int32_t i = 0; i < static_cast<std::int32_t>(ids.size()); ++i) input.position.push_back(i);
  const std::vector<std::int32_t> subtree_end(ids.size(), static_cast<std::int32_t>(ids.size()));
  at::Tensor subtree_end_T, depth_T;
  input.output_row = input.output_position = input.position;
  ControlBlock block;
  input.add_to(block);
  block.add(subtree_end, subtree_end_T);
  if (model.shape.window() > 0) block.add(input.position, depth_T);
  block.hand_over(arena.device());
  const RowRun whole{0, static_cast<std::int32_t>(ids.size()), -1, -1};
  PathSource kv(path, 0, false, subtree_end_T, depth_T, {whole});
  const DecoderSaved saved = decoder_forward(model.decoder, {input, kv, arena});
  const at::Tensor hidden = on_host(saved.normed_OM), head = on_host(model.decoder.weights().head_VM);
  const double factor = model.shape.scales.logits, cap = model.shape.scales.logit_cap;
  const bool exact = model.dtype == DType::bfloat16;  // logits of exact products, as the engine's head computes them
  const at::Tensor logits_TV =
      exact ? at::mm(hidden.to(at::kFloat), head.to(at::kFloat).t()) * factor : at::mm(hidden, head.t()) * factor;
  return cap > 0 ? (logits_TV / cap).tanh() * cap : logits_TV;
}

std::vector<double> dense_logprobs(ModelState& model, const Rollout& rollout) {
  std::vector<std::int32_t> ids = rollout.prompt_ids;
  ids.insert(ids.end(), rollout.response_ids.begin(), rollout.response_ids.end());
  const at::Tensor logprob =
      at::log_softmax(dense_logits_TV(model, ids).to(at::kDouble) / rollout.temperature, -1).contiguous();
  std::vector<double> out;
  for (std::int64_t i = 0; i < rollout.response_length(); ++i)
    out.push_back(
        logprob[rollout.prompt_length() + i - 1][rollout.response_ids[static_cast<std::size_t>(i)]].item<double>());
  return out;
}

std::unique_ptr<ModelState> in_float64(const ModelState& model) {
  auto exact = std::make_unique<ModelState>(model.shape, DType::float64);
  bound_device().to_device(on_host(model.weights).to(at::kDouble), exact->weights);
  return exact;
}

}  // namespace espalier::testing
