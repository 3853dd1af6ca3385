#include "espalier/phase/stage.h"

#include <algorithm>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "espalier/device/host_values.h"
#include "espalier/phase/in_step.h"
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

class StageExecutor : public Executor {
 public:
  RunResult result;

  StageExecutor(const StepRun& step, const StepPlan& plan)
      : step_(step),
        in_step_(step.decoder.mesh(), plan),
        cp_(step.decoder.mesh().cp),
        pp_(step.decoder.mesh().pp),
        most_in_flight_(static_cast<std::size_t>(pp_.size() - pp_.rank())) {
    Device& device = step.decoder.device();
    // One region is enough where no wave outlives its event: the arena itself.
    if (step.trains() && most_in_flight_ > 1)
      for (std::size_t i = 0; i < most_in_flight_; ++i)
        regions_.push_back(std::make_unique<Arena>(step.arena.limit(), device));
    const std::int64_t items = count_items(plan.items, cp_.rank());
    backwards_left_ = std::max(items, in_step_.backwards());
    if (!step.trains() || step.accounting == nullptr || !step.accounting->has_losses()) return;
    penalties_IL2_ = device.allocate({items, step.decoder.shape().expert_layers(), 2}, at::kDouble);
    device.operations().zero(penalties_IL2_);  // nobody writes where a rank has no rows of an item
  }
  // After an error the innermost trunk gives its part of the arena back first; a deque would begin with the outermost.
  ~StageExecutor() override {
    in_flight_.clear();
    while (!open_.empty()) open_.pop_back();
  }

  void open_trunk(const PlanItem& item) override {
    begin_own(Event::open);
    end_waves();
    trim();
    OpenItem& trunk = open_.emplace_back(step_, item, step_.arena);
    step_.path.push(item.set.rows, count_items(item.below, cp_.rank()) + in_step_.joined_below());
    book_open([&] { trunk.run.forward(); });
    result.trunk_rows += trunk.run.rows();
    ++result.trunk_forwards;
    rows_done_ += item.set.rows;
  }

  void run_wave(const PlanItem& item) override {
    if (!open_.empty()) open_.back().ask_ahead_of(item);
    rows_done_ += item.set.rows;
    if (runs_on(item, cp_.rank())) {
      begin_own(Event::wave);
      begin_wave(&item);
    }
    if (step_.on_rows) step_.on_rows(rows_done_);
  }

  void close_trunk(const PlanItem& item) override {
    begin_own(Event::close);
    end_waves();
    trim();
    OpenItem& trunk = open_.back();
    trunk.run.ask_ahead();
    if (open_.size() > 1) open_[open_.size() - 2].ask_ahead_of(item);
    if (step_.trains()) book_close([&] { add_backward(trunk.run); });
    step_.path.pop();
    open_.pop_back();
    trim();
  }

  // What other ranks still run, after one's own last wave.
  void finish() {
    join_others();
    end_waves();
    add_penalties();
    for (const Span& span : spans_) *span.seconds += step_.arena.device().seconds_between(span.begin, span.end);
    spans_.clear();
  }

 private:
  // Takes part, without rows, in the events that others have before its own next one.
  void join_others() {
    while (const std::optional<InStep::Turn> turn = in_step_.take_of_others()) switch (turn->event) {
        case Event::open:
          end_waves();
          book_open([&] { join_forward(step_, turn->on_path); });
          break;
        case Event::wave:
          begin_wave(nullptr, turn->on_path);
          break;
        case Event::close:
          end_waves();
          if (step_.trains()) book_close([&] { run_backward([&] { join_backward(step_, turn->on_path); }); });
          break;
      }
  }
  void begin_own(Event event) {
    join_others();
    in_step_.take_own(event);
  }

  void end_waves() {
    while (!in_flight_.empty()) end_first_wave();
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

  // What an item took from the arena goes back when it has ended, a trunk after everything below it.
  struct OpenItem {
    OpenItem(const StepRun& step, const PlanItem& which, Arena& arena)
        : item(which), scope(arena), run(step, which, arena) {}

    // What was stored away is fetched while the last item below runs.
    void ask_ahead_of(const PlanItem& below) {
      if (&below == &item.below.back()) run.ask_ahead();
    }

    const PlanItem& item;
    ArenaScope scope;
    ItemRun run;
  };

  // A wave in flight: of its own, or of others, and whether they divide the path that it sees.
  struct Wave {
    std::optional<OpenItem> own = {};
    bool on_path = false;
  };

  // Null: a wave that others run, which is in flight here as it is there.
  void begin_wave(const PlanItem* item, bool on_path = false) {
    Arena* region = regions_.empty() ? nullptr : regions_[waves_begun_++ % regions_.size()].get();
    book_wave([&] {
      Wave& begun = in_flight_.emplace_back();
      begun.on_path = on_path;
      if (item == nullptr) return join_forward(step_, on_path);
      OpenItem& wave = begun.own.emplace(step_, *item, region ? *region : step_.arena);
      wave.run.forward();
      result.wave_rows += wave.run.rows();
    });
    if (region) region->trim();  // until its backward it holds what it saves
    if (!step_.trains()) return in_flight_.pop_front();
    if (in_flight_.size() == most_in_flight_) end_first_wave();
  }

  void end_first_wave() {
    book_wave([&] {
      Wave& first = in_flight_.front();
      if (first.own) return add_backward(first.own->run);
      run_backward([&] { join_backward(step_, first.on_path); });
    });
    in_flight_.pop_front();
    if (!regions_.empty()) regions_[waves_ended_++ % regions_.size()]->trim();
  }

  void add_backward(ItemRun& run) {
    run_backward(
        [&] { run.add_backward(penalties_IL2_.defined() ? penalties_IL2_.select(0, backwards_++) : at::Tensor()); });
  }

  // Own or joined: behind the last of them nothing is added to the gradients.
  template <class Work>
  void run_backward(Work&& work) {
    if (--backwards_left_ > 0) return work();
    step_.gradients->begin_last_backward();
    result.last_backward_began = Timer::steady_seconds();
    work();
    result.last_backward_ended = Timer::steady_seconds();
  }

  // Where something is stored away, pages above the stack are not left to it: they would be held beside those below.
  void trim() {
    if (step_.spill != nullptr || step_.path.sleeps()) step_.arena.trim();
  }

  // Of one phase.
  struct Books {
    double& seconds;
    std::int64_t& peak;
    AxisBytes& bytes;
  };

  // Work that was called, and where its time is booked: asked for at the end, so that nobody waits before.
  struct Span {
    double* seconds;
    Device::Moment begin, end;
  };

  // Runs one phase of one item and books its time, its peak and what it communicates.
  template <class Work>
  void book(const Books& books, Work&& work) {
    Device& device = step_.arena.device();
    const Device::Moment begin = device.moment();
    const double waited = pp_.waited();
    const Mesh& mesh = step_.decoder.mesh();
    const AxisBytes before = mesh.bytes();
    const std::int64_t ahead = bytes_ahead();
    step_.arena.reset_high_water();
    for (const auto& region : regions_) region->reset_high_water();
    work();
    std::int64_t in_regions = 0;
    for (const auto& region : regions_) in_regions += region->high_water();
    books.peak = std::max(books.peak, step_.arena.high_water() + in_regions);
    books.bytes += mesh.bytes() - before;
    books.bytes.dp -= bytes_ahead() - ahead;  // of the reduction, which has begun
    spans_.push_back({&books.seconds, begin, device.moment()});
    result.seconds.waiting += pp_.waited() - waited;
  }
  std::int64_t bytes_ahead() const { return step_.trains() ? step_.gradients->given_ahead() : 0; }
  template <class Work>
  void book_open(Work&& work) {
    book({result.seconds.trunk_forward, result.arena_bytes.a, result.bytes.a}, work);
  }
  template <class Work>
  void book_close(Work&& work) {
    book({result.seconds.trunk_backward, result.arena_bytes.c, result.bytes.c}, work);
  }
  template <class Work>
  void book_wave(Work&& work) {
    book({result.seconds.waves, result.arena_bytes.b, result.bytes.b}, work);
  }

  const StepRun& step_;
  InStep in_step_;
  const Group &cp_, &pp_;
  const std::size_t most_in_flight_;
  std::vector<std::unique_ptr<Arena>> regions_;  // of waves in flight, in turn; none: the arena serves them
  std::deque<OpenItem> open_;                    // trunks, innermost last
  std::deque<Wave> in_flight_;                   // waves whose backward has not run, oldest first
  at::Tensor penalties_IL2_;  // of the items in the order of their backwards; undefined without router losses
  std::int64_t backwards_ = 0, backwards_left_ = 0, rows_done_ = 0;
  std::size_t waves_begun_ = 0, waves_ended_ = 0;
  std::vector<Span> spans_;
};

}  // namespace

RunResult run_stage(const StepRun& step, const StepPlan& plan) {
  StageExecutor executor(step, plan);
  run_schedule(plan.items, executor);
  executor.finish();
  return executor.result;
}

}  // namespace espalier
