#include "espalier/plan/frontier.h"

#include <algorithm>
#include <iomanip>
#include <sstream>

#include "espalier/base/error.h"
#include "espalier/base/json.h"
#include "espalier/base/units.h"
#include "espalier/grouping/prefix_tree.h"
#include "espalier/plan/rank_layout.h"

namespace espalier {
namespace {

struct Way {
  const char* name;
  Schedule schedule;
  SavedState state;
};
constexpr Way kWays[] = {{"dense", Schedule::dense, SavedState::automatic},
                         {"packed", Schedule::packed, SavedState::automatic},
                         {"phased, keep", Schedule::phased, SavedState::keep},
                         {"phased, recompute", Schedule::phased, SavedState::recompute},
                         {"phased, offload", Schedule::phased, SavedState::offload}};

constexpr std::int64_t kFirstPrompt = 1024, kParts = 256;

std::vector<Rollout> group_of(std::int64_t n, std::int64_t prompt, std::int64_t response) {
  std::vector<Rollout> group(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; ++i) {
    Rollout& rollout = group[static_cast<std::size_t>(i)];
    rollout.prompt_ids.assign(static_cast<std::size_t>(prompt), 0);
    rollout.response_ids.assign(static_cast<std::size_t>(response), 0);
    rollout.response_ids.front() = static_cast<std::int32_t>(i);  // nothing but the prompt is shared
    rollout.loss_mask.assign(static_cast<std::size_t>(response), 1);
  }
  return group;
}

// One cell: tries prompts.
class Probe {
 public:
  Probe(const ModelShape& shape, const PlanOptions& options, const MachineProfile& profile, const Way& way,
        std::int64_t n, std::int64_t response, const FrontierRanks& ranks)
      : shape_(shape), options_(options), profile_(profile), response_(response), ranks_(ranks) {
    options_.schedule = way.schedule;
    options_.trunk_state = way.state;
    cell_.n = n;
    cell_.way = way.name;
  }

  FrontierCell longest() {
    const std::int64_t most = shape_.max_positions > 0 ? shape_.max_positions - response_ : std::int64_t{1} << 20;
    std::int64_t fits = 0, fails = most + 1;
    for (std::int64_t prompt = std::min(kFirstPrompt, most); prompt <= most;) {
      if (!try_prompt(prompt)) {
        fails = prompt;
        break;
      }
      fits = prompt;
      if (prompt == most) break;
      prompt = std::min(2 * prompt, most);
    }
    while (fails - fits > 1 + fits / kParts) {
      const std::int64_t middle = fits + (fails - fits) / 2;
      (try_prompt(middle) ? fits : fails) = middle;
    }
    if (fits == most) cell_.limit = FrontierCell::Limit::positions;
    return cell_;
  }

 private:
  // Keeps what fits, and why something did not.
  bool try_prompt(std::int64_t prompt) {
    const std::vector<Rollout> group = group_of(cell_.n, prompt, response_);
    PlanOptions options = options_;
    if (options.schedule == Schedule::dense) options.token_budget = prompt + response_;
    if (options.schedule == Schedule::packed) options.token_budget = prompt + cell_.n * response_;
    const ScheduleCost found = cost_of(group, options);
    const bool room = found.cost.all_stored() <= options.spill_room;
    if (!found.cost.fits || !room) {
      cell_.limit = found.cost.fits ? FrontierCell::Limit::spill_room : FrontierCell::Limit::memory;
      return false;
    }
    cell_.prompt = prompt;
    cell_.token_budget = found.token_budget;
    cell_.cost = found.cost;
    return true;
  }

  ScheduleCost cost_of(const std::vector<Rollout>& group, const PlanOptions& options) const {
    const std::vector<PrefixTree> trees = build_prefix_trees(group, ShareMode::whole_trees);
    if (ranks_.degrees == Degrees{}) return cost_of_schedule(group, trees, shape_, options, profile_);
    return cost_on_ranks({group, trees, shape_, options, profile_, ranks_.shard}, ranks_.degrees);
  }

  const ModelShape& shape_;
  PlanOptions options_;
  const MachineProfile& profile_;
  std::int64_t response_;
  FrontierRanks ranks_;
  FrontierCell cell_;
};

const char* name_of(FrontierCell::Limit limit) {
  return limit == FrontierCell::Limit::positions    ? "positions"
         : limit == FrontierCell::Limit::spill_room ? "spill_room"
                                                    : "memory";
}

const char* mark_of(FrontierCell::Limit limit) {
  return limit == FrontierCell::Limit::positions ? ">= " : limit == FrontierCell::Limit::spill_room ? "* " : "";
}

}  // namespace

double Frontier::factor(std::size_t size, std::size_t way) const {
  const std::int64_t dense = cell(size, 0).total(response);
  return dense == 0 ? 0 : static_cast<double>(cell(size, way).total(response)) / static_cast<double>(dense);
}

Frontier find_frontier(const ModelShape& shape, const PlanOptions& options, const MachineProfile& profile,
                       std::vector<std::int64_t> sizes, std::int64_t response, const FrontierRanks& ranks,
                       const std::function<void(std::int64_t cells)>& on_cell) {
  LocalShape(shape, ranks.degrees, {});  // says what does not divide the model
  if (shape.max_positions > 0 && response >= shape.max_positions)
    throw OptionError({"--max-response-length",
                       text_of("fewer than ", shape.max_positions, " tokens, the model's number of positions"),
                       text_of(response), "lower --max-response-length"});
  std::ranges::sort(sizes);
  Frontier frontier;
  frontier.memory_budget = options.memory_budget;
  frontier.response = response;
  frontier.sizes = std::move(sizes);
  for (const Way& way : kWays) frontier.ways.emplace_back(way.name);
  for (const std::int64_t n : frontier.sizes)
    for (const Way& way : kWays) {
      frontier.cells.push_back(Probe(shape, options, profile, way, n, response, ranks).longest());
      if (on_cell) on_cell(static_cast<std::int64_t>(frontier.cells.size()));
    }
  return frontier;
}

Json to_json(const Frontier& frontier) {
  Json cells = Json::array();
  for (std::size_t size = 0; size < frontier.sizes.size(); ++size)
    for (std::size_t way = 0; way < frontier.ways.size(); ++way) {
      const FrontierCell& cell = frontier.cell(size, way);
      const PhasePeaks& bytes = cell.cost.bytes;
      cells.push_back({{"n", cell.n},
                       {"way", cell.way},
                       {"prompt", cell.prompt},
                       {"factor", frontier.factor(size, way)},
                       {"limit", name_of(cell.limit)},
                       {"token_budget", cell.token_budget},
                       {"seconds", cell.cost.seconds},
                       {"peak_bytes", {{"A", bytes.a}, {"B", bytes.b}, {"C", bytes.c}}},
                       {"stored_bytes", cell.cost.all_stored()}});
    }
  return {{"memory_budget", frontier.memory_budget}, {"response", frontier.response}, {"cells", std::move(cells)}};
}

std::string table_of(const Frontier& frontier) {
  constexpr int kName = 20, kColumn = 18;
  std::ostringstream out;
  const auto add_rows = [&](auto&& text_of_cell) {
    for (std::size_t way = 0; way < frontier.ways.size(); ++way) {
      out << "  " << std::left << std::setw(kName - 2) << frontier.ways[way] << std::right;
      for (std::size_t size = 0; size < frontier.sizes.size(); ++size)
        out << std::setw(kColumn) << (frontier.cell(size, way).prompt > 0 ? text_of_cell(size, way) : "-");
      out << '\n';
    }
  };
  out << "The longest prompt within " << format_bytes(frontier.memory_budget) << ", with responses of "
      << format_count(frontier.response) << " tokens; prompt and response relative to dense\n\n"
      << std::setw(kName) << "";
  for (const std::int64_t n : frontier.sizes) out << std::setw(kColumn) << text_of("N = ", n);
  out << '\n';
  add_rows([&](std::size_t size, std::size_t way) {
    const FrontierCell& cell = frontier.cell(size, way);
    std::ostringstream text;
    text << mark_of(cell.limit) << format_count(cell.prompt) << std::fixed << std::setprecision(2);
    if (const double factor = frontier.factor(size, way); factor > 0) text << "  " << factor << 'x';
    return text.str();
  });
  out << "\nSeconds of that step, predicted\n\n";
  add_rows([&](std::size_t size, std::size_t way) { return format_seconds(frontier.cell(size, way).cost.seconds); });
  out << "\nDense runs one rollout per micro-batch, packed a whole group at once; neither is split. Waves of phased "
         "are as "
         "small as\nnecessary.\n";
  const auto any = [&](FrontierCell::Limit limit) {
    return std::ranges::find(frontier.cells, limit, &FrontierCell::limit) != frontier.cells.end();
  };
  if (any(FrontierCell::Limit::positions)) out << ">= limited by the model's number of positions\n";
  if (any(FrontierCell::Limit::spill_room)) out << "* limited by the space for offloaded state\n";
  return out.str();
}

}  // namespace espalier
