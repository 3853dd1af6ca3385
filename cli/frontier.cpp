// espalier plan --frontier: the longest prompt that fits, from config.json alone.
#include <cmath>

#include "cli/plan.h"
#include "espalier/base/atomic_file.h"
#include "espalier/base/error.h"
#include "espalier/base/units.h"
#include "espalier/config/model_config.h"
#include "espalier/machine/memory.h"
#include "espalier/plan/frontier.h"
#include "espalier/report/frontier_picture.h"
#include "espalier/shape/trained_parameters.h"
#include "espalier/state/planning.h"
#include "espalier/state/trained_choice.h"

namespace espalier::cli {
namespace {

std::vector<std::int64_t> sizes_of(const Options& options) {
  std::vector<std::int64_t> sizes;
  for (const double n : parse_numbers("--n", options.n)) {
    if (n != std::floor(n)) throw OptionError({"--n", "whole numbers, each at least 1", '"' + options.n + '"', ""});
    sizes.push_back(std::llround(n));
  }
  return sizes;
}

}  // namespace

int run_frontier(Context& context) {
  const Options& options = context.options;
  if (!options.rollouts.empty())
    throw OptionError({"--frontier", "no --rollouts: --n and --max-response-length define its groups", "--rollouts",
                       "leave one of the two out"});
  const ModelShape shape = read_trained_shape(options.model, trained_choice(options));
  const std::vector<std::int64_t> sizes = sizes_of(options);
  PlanOptions plan_options = plan_options_of(options);
  const MachineProfile profile = machine_of(context, plan_options);
  if (plan_options.memory_budget == 0) plan_options.memory_budget = budget_of(options).bytes;
  plan_options.kind = step_kind_of(options, shape, {});

  const Degrees degrees = degrees_of(options);
  if (degrees.ranks() > 1) {
    context.result["layout"] = text_of_degrees(degrees);
    context.text << "On each of " << degrees.ranks() << " processes, " << text_of_degrees(degrees) << "\n\n";
  }
  const auto cells = static_cast<std::int64_t>(5 * sizes.size());
  context.progress.begin("the frontier", cells, "cells");
  const Frontier frontier =
      find_frontier(shape, plan_options, profile, sizes, options.max_response_length, {degrees, options.shard},
                    [&](std::int64_t done) { context.progress.advance_to(done); });
  context.progress.end();
  context.result["frontier"] = to_json(frontier);
  context.result["machine"] = profile.line();
  context.result["memory_budget"] = plan_options.memory_budget;
  context.text << table_of(frontier) << "Machine: " << profile.line().substr(0, profile.line().find(':')) << '\n';
  if (options.out.empty()) return 0;
  AtomicFile picture(options.out);
  picture.write(frontier_picture(frontier));
  picture.commit();
  context.text << "Picture: " << options.out << '\n';
  return 0;
}

}  // namespace espalier::cli
