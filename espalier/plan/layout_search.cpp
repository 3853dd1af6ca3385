#include "espalier/plan/layout_search.h"

#include <algorithm>
#include <tuple>

#include "espalier/base/error.h"
#include "espalier/base/json.h"
#include "espalier/base/units.h"
#include "espalier/forecast/memory_model.h"

namespace espalier {
namespace {

std::vector<std::int64_t> divisors(std::int64_t number, bool more_than_one) {
  std::vector<std::int64_t> out;
  for (std::int64_t d = 1; d <= (more_than_one ? number : 1); ++d)
    if (number % d == 0) out.push_back(d);
  return out;
}

std::vector<Degrees> candidates(const LayoutProblem& problem, std::int64_t ranks, const SearchedAxes& axes) {
  const ModelShape& shape = problem.shape;
  std::vector<Degrees> out;
  for (const std::int64_t tp : divisors(ranks, axes.tp))
    for (const std::int64_t pp : divisors(ranks / tp, axes.pp))
      for (const std::int64_t cp : divisors(ranks / tp / pp, axes.cp)) {
        const std::int64_t dp = ranks / tp / pp / cp;
        if (tp > problem.profile.ranks_per_machine || (dp > 1 && !axes.dp)) continue;
        for (const std::int64_t ep : divisors(dp * cp * tp, axes.ep && shape.experts > 0)) {
          const bool full = problem.shard == Sharding::full && dp * cp > 1;
          const Degrees degrees{.tp = tp, .cp = cp, .pp = pp, .dp = dp, .ep = ep, .full = full};
          if (ep > tp && problem.shard == Sharding::optimizer) continue;
          try {
            LocalShape(shape, degrees, {});
            out.push_back(degrees);
          } catch (const OptionError&) {  // the model cannot be divided so
          }
        }
      }
  return out;
}

// A layout needs no plan if weights, gradients and state leave no room for one.
TriedLayout tried_layout(const LayoutProblem& problem, const Degrees& degrees) {
  const PlanOptions options = options_of_rank(problem, degrees);
  const std::int64_t constant =
      ActivationBytes(LocalShape(problem.shape, degrees, {}), options.dtype, options.kind, options.setting).constant();
  if (problem.options.memory_budget > 0 && constant > problem.options.memory_budget)
    return {degrees, 0, constant, false};
  const LayoutPlan plan = plan_layout(problem, degrees, WhichRanks::busiest);
  return {degrees, plan.seconds, plan.bytes.peak(), plan.fits()};
}

std::string named(const TriedLayout& tried) {
  return text_of(text_of_degrees(tried.degrees), tried.fits
                                                     ? text_of(" takes ", format_seconds(tried.seconds))
                                                     : text_of(" needs ", format_bytes(tried.peak_bytes), " a rank"));
}

}  // namespace

FoundLayout find_layout(const LayoutProblem& problem, std::int64_t ranks, const SearchedAxes& axes) {
  FoundLayout found;
  for (const Degrees& degrees : candidates(problem, ranks, axes)) found.tried.push_back(tried_layout(problem, degrees));
  if (found.tried.empty())
    throw OptionError({"--layout auto", text_of("a layout of the model over ", ranks, " processes"), "none",
                       "choose a number of processes that fits the numbers of heads, layers and experts"});
  // Fitting ones by time, then the others by what they need; of equals the one with the fewest ranks a copy.
  std::ranges::stable_sort(found.tried, [](const TriedLayout& a, const TriedLayout& b) {
    const auto key = [](const TriedLayout& t) {
      return std::tuple{!t.fits, t.fits ? t.seconds : static_cast<double>(t.peak_bytes),
                        t.degrees.ranks() / t.degrees.dp};
    };
    return key(a) < key(b);
  });
  const auto fitting = std::ranges::count(found.tried, true, &TriedLayout::fits);
  found.best = plan_layout(problem, found.tried.front().degrees);
  found.reason = text_of(named(found.tried.front()), ", the ", fitting > 0 ? "least" : "least of all", " of ",
                         found.tried.size(), " layouts of ", ranks, " processes, ", fitting, " of which fit");
  if (found.tried.size() > 1) found.reason += "; the next best, " + named(found.tried[1]);
  return found;
}

Json to_json(const TriedLayout& tried) {
  const Degrees& d = tried.degrees;
  return {{"tp", d.tp},
          {"cp", d.cp},
          {"pp", d.pp},
          {"ep", d.ep},
          {"dp", d.dp},
          {"seconds", tried.seconds},
          {"peak_bytes", tried.peak_bytes},
          {"fits", tried.fits}};
}

}  // namespace espalier
