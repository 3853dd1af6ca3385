// espalier merge ADAPTER: a base model and a LoRA adapter as one model directory.
#include "espalier/merge/merge.h"
#include "cli/verbs.h"
#include "espalier/base/error.h"
#include "espalier/base/units.h"

namespace espalier::cli {

int run_merge(Context& context) {
  const std::string& option = context.options.adapter;
  if (context.arguments.empty() == option.empty())
    throw OptionError({"merge", "one adapter: as its argument, or with --adapter", option.empty() ? "none" : "two",
                       "espalier merge ADAPTER --model BASE --out MERGED"});
  const MergeReport report = merge(option.empty() ? context.arguments[0] : option, context.options, context.progress);
  context.result["changed"] = report.changed;
  context.result["tensors"] = report.parameters;
  context.result["rank"] = report.rank;
  context.result["scale"] = report.scale;
  context.text << format_count(report.changed) << " of " << format_count(report.parameters)
               << " tensors changed by the adapter (rank " << report.rank << ", scale " << report.scale
               << ")\nwritten: " << context.options.out << "\n";
  return 0;
}

}  // namespace espalier::cli
