// The verbs of the program: one row and one function each.
#pragma once

#include <ostream>
#include <string>
#include <vector>

#include "espalier/base/json.h"
#include "espalier/metrics/progress.h"
#include "espalier/options/options.h"

namespace espalier {
struct Mesh;
}

namespace espalier::cli {

// Input of a verb. Options are checked and `options.threads` is the number that runs.
struct Context {
  const Options& options;
  const std::vector<std::string>& arguments;  // what stands on the command line without an option before it
  Progress& progress;                         // to stderr, or nowhere with --quiet; throws on an interrupt
  std::ostream& text;                         // to stdout for a person; nowhere with --json, or on other ranks than 0
  const Mesh& mesh;                           // this process among the processes of the run
  Json result = Json::object();               // the verb's own fields of the --json object
};

inline constexpr int kFailedVerification = 6;  // an exit code

// The exit code: 0, or that of a verdict whose details are in the result. Errors are thrown.
int run_inspect(Context& context);
int run_convert(Context& context);
int run_plan(Context& context);
int run_train(Context& context);
int run_score(Context& context);
int run_verify(Context& context);
int run_grpo(Context& context);
int run_bench(Context& context);
int run_generate(Context& context);
int run_replay(Context& context);
int run_report(Context& context);
int run_merge(Context& context);
int run_serve(Context& context);
int run_selftest(Context& context);
int run_doctor(Context& context);
int run_completion(Context& context);

struct Verb {
  char letter;  // the letter of the option table
  const char* name;
  const char* arguments;              // as the usage line shows them
  std::size_t least, most;            // how many of them
  std::vector<std::string> required;  // options that must be given; "a|b": one of them
  const char* summary;
  int (*run)(Context&);
};
const std::vector<Verb>& verbs();

}  // namespace espalier::cli
