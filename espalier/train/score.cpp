#include "espalier/train/score.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <chrono>

#include "espalier/base/error.h"
#include "espalier/phase/schedule.h"
#include "espalier/rollout/writer.h"
#include "espalier/train/machine.h"
#include "espalier/train/step.h"

namespace espalier {
namespace {

std::vector<ExtraSeries> extras_of(const RolloutSeries& series, const Options& options) {
  std::vector<ExtraSeries> extras{{options.as, series.logprob}};
  if (options.entropies) extras.push_back({"entropies", series.entropy});
  return extras;
}

}  // namespace

ScoreReport score(const Options& options, Progress& progress) {
  if (options.out.empty()) throw OptionError({"--out", "a file to write", "nothing", "give --out scored.jsonl"});
  const auto model = load_model(options.model, parse_dtype(options.dtype), progress);
  const std::vector<Rollout> rollouts = read_for_model(options.rollouts, model->shape.vocabulary, progress);
  std::int32_t longest = 0;
  for (const Rollout& rollout : rollouts) longest = std::max(longest, rollout.length());
  model->decoder.reserve_positions(longest);
  RolloutWriter writer(options.out);  // before the work, so that an unwritable place costs nothing

  const auto begin = std::chrono::steady_clock::now();
  const StepPlan plan = plan_step(model->shape, options, machine_profile(options, progress), rollouts, true,
                                  {.gradients = false, .optimizer = false});
  Arena arena(arena_limit(options));
  KvPath path(model->shape, plan.max_path_rows, model->decoder.dtype(), false, arena);
  StepRun run{model->decoder, rollouts, path, arena, nullptr, nullptr, true};
  progress.begin("scoring", plan.physical_rows(), "rows");
  run.on_rows = [&](std::int64_t rows) { progress.advance_to(rows); };
  run_schedule(run, plan);
  progress.end();

  ScoreReport report;
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  report.logical_rows = plan.logical_rows;
  report.physical_rows = run.trunk_rows + run.wave_rows;
  for (std::size_t i = 0; i < rollouts.size(); ++i) {
    report.tokens += rollouts[i].response_length();
    writer.write(rollouts[i], extras_of(run.series[i], options));
  }
  report.rollouts = static_cast<std::int64_t>(rollouts.size());
  writer.finish();
  return report;
}

}  // namespace espalier
