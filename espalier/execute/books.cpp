#include "espalier/execute/books.h"

namespace espalier {

Books::Begun Books::begin() {
  const Mesh& mesh = step_.decoder.mesh();
  const Begun begun{step_.arena.device().moment(), mesh.pp.waited(), mesh.bytes(), bytes_ahead()};
  step_.arena.reset_high_water();
  for (const auto& region : regions_) region->reset_high_water();
  return begun;
}

void Books::end(const Step& step, const Begun& begun) {
  const Mesh& mesh = step_.decoder.mesh();
  const bool wave = step.kind == ItemKind::wave, forward = step.pass == Pass::forward;
  PhaseSeconds& all = result_.seconds;
  double& seconds = wave ? all.waves : forward ? all.trunk_forward : all.trunk_backward;
  std::int64_t& peak = wave ? result_.arena_bytes.b : forward ? result_.arena_bytes.a : result_.arena_bytes.c;
  AxisBytes& bytes = wave ? result_.bytes.b : forward ? result_.bytes.a : result_.bytes.c;
  std::int64_t high_water = step_.arena.high_water();
  for (const auto& region : regions_) high_water += region->high_water();
  peak = std::max(peak, high_water);
  bytes += mesh.bytes() - begun.bytes;
  bytes.dp -= bytes_ahead() - begun.ahead;  // of the reduction, which has begun
  spans_.push_back({&seconds, begun.moment, step_.arena.device().moment()});
  all.waiting += mesh.pp.waited() - begun.waited;
}

void Books::finish() {
  for (const Span& span : spans_) *span.seconds += step_.arena.device().seconds_between(span.begin, span.end);
  spans_.clear();
}

}  // namespace espalier
