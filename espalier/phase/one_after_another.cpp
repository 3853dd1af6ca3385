#include "espalier/phase/one_after_another.h"

#include <algorithm>
#include <deque>

#include "espalier/device/host_values.h"
#include "espalier/phase/item_run.h"
#include "espalier/phase/schedule.h"
#include "espalier/plan/row_shares.h"

namespace espalier {
namespace {

// Those that a rank of cp runs, whole or its share of them.
std::int64_t count_items(const std::vector<PlanItem>& items, std::int64_t cp_rank) {
  std::int64_t count = 0;
  for (const PlanItem& item : items) count += (runs_on(item, cp_rank) ? 1 : 0) + count_items(item.below, cp_rank);
  return count;
}

class OneAfterAnother : public Executor {
 public:
  OneAfterAnother(const StepRun& step, const StepPlan& plan) : step_(step), cp_(step.decoder.mesh().cp) {
    const std::int64_t items = count_items(plan.items, cp_.rank());
    if (!step.trains() || step.accounting == nullptr || !step.accounting->has_losses()) return;
    Device& device = step.decoder.device();
    penalties_IL2_ = device.allocate({items, step.decoder.shape().expert_layers(), 2}, at::kDouble);
    device.operations().zero(penalties_IL2_);  // nobody writes where a rank has no rows of an item
  }
  // After an error the innermost trunk gives its part of the arena back first; a deque would begin with the outermost.
  ~OneAfterAnother() override {
    while (!open_.empty()) open_.pop_back();
  }

  void open_trunk(const PlanItem& item) override {
    trim();
    OpenTrunk& trunk = open_.emplace_back(step_, item);
    step_.path.push(item.set.rows, count_items(item.below, cp_.rank()));
    book({result.seconds.trunk_forward, result.arena_bytes.a, result.cp_bytes.a}, [&] { trunk.run.forward(); });
    result.trunk_rows += trunk.run.rows();
    ++result.trunk_forwards;
    rows_done_ += item.set.rows;
  }

  void run_wave(const PlanItem& item) override {
    if (!open_.empty()) open_.back().ask_ahead_of(item);
    rows_done_ += item.set.rows;
    if (runs_on(item, cp_.rank())) run_own_wave(item);
    if (step_.on_rows) step_.on_rows(rows_done_);
  }

  void close_trunk(const PlanItem& item) override {
    trim();
    OpenTrunk& trunk = open_.back();
    trunk.run.ask_ahead();
    if (open_.size() > 1) open_[open_.size() - 2].ask_ahead_of(item);
    if (step_.trains())
      book({result.seconds.trunk_backward, result.arena_bytes.c, result.cp_bytes.c}, [&] { add_backward(trunk.run); });
    step_.path.pop();
    open_.pop_back();
    trim();
  }

  // The values of the router losses, in the order of the backwards, which ends in the first layer.
  void add_penalties() {
    if (!penalties_IL2_.defined()) return;
    const at::Tensor on_host = step_.decoder.device().to_host(penalties_IL2_);
    const auto values = host_values<const double>(on_host);
    const std::size_t of_item = 2 * static_cast<std::size_t>(step_.decoder.shape().expert_layers());
    for (std::size_t item = 0; item < values.size(); item += of_item)
      for (std::size_t at = item + of_item; at > item; at -= 2) step_.accounting->add({values[at - 2], values[at - 1]});
  }

  RunResult result;

 private:
  // What a trunk took from the arena goes back when it is closed, after everything below it.
  struct OpenTrunk {
    OpenTrunk(const StepRun& step, const PlanItem& trunk) : item(trunk), scope(step.arena), run(step, trunk) {}

    // What was stored away is fetched while the last item below runs.
    void ask_ahead_of(const PlanItem& below) {
      if (&below == &item.below.back()) run.ask_ahead();
    }

    const PlanItem& item;
    ArenaScope scope;
    ItemRun run;
  };

  void run_own_wave(const PlanItem& item) {
    book({result.seconds.waves, result.arena_bytes.b, result.cp_bytes.b}, [&] {
      const ArenaScope scope(step_.arena);
      ItemRun wave(step_, item);
      wave.forward();
      if (step_.trains()) add_backward(wave);
      result.wave_rows += wave.rows();
    });
  }

  void add_backward(ItemRun& run) {
    run.add_backward(penalties_IL2_.defined() ? penalties_IL2_.select(0, backwards_++) : at::Tensor());
  }

  // Where trunks are stored away, pages above the stack are not left to it: they would be held beside those below.
  void trim() {
    if (step_.spill != nullptr) step_.arena.trim();
  }

  // Of one phase.
  struct Books {
    double& seconds;
    std::int64_t &peak, &cp_bytes;
  };

  // Runs one phase of one item and books its time, its peak and what it communicates.
  template <class Work>
  void book(const Books& books, Work&& work) {
    const double begin = step_.arena.device().seconds();
    const std::int64_t bytes = cp_.bytes();
    step_.arena.reset_high_water();
    work();
    books.peak = std::max(books.peak, step_.arena.high_water());
    books.cp_bytes += cp_.bytes() - bytes;
    books.seconds += step_.arena.device().seconds() - begin;
  }

  const StepRun& step_;
  const Group& cp_;
  std::deque<OpenTrunk> open_;  // innermost last
  at::Tensor penalties_IL2_;    // of the items in the order of their backwards; undefined without router losses
  std::int64_t backwards_ = 0, rows_done_ = 0;
};

}  // namespace

RunResult run_one_after_another(const StepRun& step, const StepPlan& plan) {
  OneAfterAnother executor(step, plan);
  run_schedule(plan.items, executor);
  executor.add_penalties();
  return executor.result;
}

}  // namespace espalier
