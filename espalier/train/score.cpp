#include "espalier/train/score.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <utility>

#include "espalier/base/error.h"
#include "espalier/observe/timer.h"
#include "espalier/phase/schedule.h"
#include "espalier/rollout/writer.h"
#include "espalier/train/machine.h"
#include "espalier/train/model_state.h"
#include "espalier/train/planning.h"
#include "espalier/train/training_data.h"

namespace espalier {
namespace {

std::vector<ExtraSeries> extras_of(const RolloutSeries& series, const Options& options) {
  std::vector<ExtraSeries> extras{{options.as, series.logprob}};
  if (options.entropies) extras.push_back({"entropies", series.entropy});
  return extras;
}

}  // namespace

ScoredRollouts score_rollouts(const Decoder& decoder, std::span<const Rollout> rollouts, const Options& options,
                              const MachineProfile& machine, Arena& arena, Progress& progress) {
  const Timer timer;
  const StepPlan plan =
      plan_step(decoder.shape(), options, machine, rollouts, true, {.gradients = false, .optimizer = false});
  const ArenaScope scope(arena);
  KvPath path(decoder.shape(), plan.max_path_rows, decoder.dtype(), false, arena);
  StepRun run{decoder, rollouts, path, arena, nullptr, nullptr, true};
  progress.begin("scoring", plan.physical_rows(), "rows");
  run.on_rows = [&](std::int64_t rows) { progress.advance_to(rows); };
  run_schedule(run, plan);
  progress.end();
  return {std::move(run.series), plan.logical_rows, run.trunk_rows + run.wave_rows, timer.total()};
}

ScoreReport score(const Options& options, Progress& progress) {
  if (options.out.empty()) throw OptionError({"--out", "a file to write", "nothing", "give --out scored.jsonl"});
  const auto model = load_model(options.model, parse_dtype(options.dtype), progress);
  const std::vector<Rollout> rollouts = read_for_model(options.rollouts, model->shape.vocabulary, progress);
  std::int32_t longest = 0;
  for (const Rollout& rollout : rollouts) longest = std::max(longest, rollout.length());
  model->decoder.reserve_positions(longest);
  RolloutWriter writer(options.out);  // before the work, so that an unwritable place costs nothing

  Arena arena(arena_limit(options));
  const ScoredRollouts scored =
      score_rollouts(model->decoder, rollouts, options, machine_profile(options, progress), arena, progress);
  ScoreReport report;
  report.seconds = scored.seconds;
  report.logical_rows = scored.logical_rows;
  report.physical_rows = scored.physical_rows;
  for (std::size_t i = 0; i < rollouts.size(); ++i) {
    report.tokens += rollouts[i].response_length();
    writer.write(rollouts[i], extras_of(scored.series[i], options));
  }
  report.rollouts = static_cast<std::int64_t>(rollouts.size());
  writer.finish();
  return report;
}

}  // namespace espalier
