#include "cli/ranks.h"

#include <filesystem>
#include <system_error>

#include "espalier/base/error.h"
#include "espalier/base/json.h"
#include "espalier/checkpoint/json_file.h"
#include "espalier/checkpoint/run_state.h"
#include "espalier/options/options_json.h"
#include "espalier/parallel/agreement.h"
#include "espalier/train/found_degrees.h"

namespace espalier::cli {
namespace {

std::string this_program() {
  std::error_code unknown;
  const std::filesystem::path path = std::filesystem::read_symlink("/proc/self/exe", unknown);
  return unknown ? "espalier" : path.string();
}

// Verbs that run on several ranks, by letter, and those that divide rows and layers over them, too.
constexpr std::string_view kRun = "tsvbrgl", kRunUnderCpAndPp = "tsvbr";

void refuse_unsupported(const Verb& verb, const Options& options) {
  const bool runs = kRun.find(verb.letter) != std::string_view::npos;
  const bool divides = kRunUnderCpAndPp.find(verb.letter) != std::string_view::npos;
  struct Axis {
    const char* name;
    std::int64_t degree;
    bool runs;
  };
  for (const Axis& axis :
       {Axis{"--tp", options.tp, runs}, Axis{"--cp", options.cp, divides}, Axis{"--pp", options.pp, divides},
        Axis{"--ep", options.ep, runs}, Axis{"--dp", options.dp, runs}})
    if (axis.degree > 1 && !axis.runs)
      throw UnsupportedError(
          {axis.name, "1", text_of(axis.degree),
           text_of("espalier ", verb.name, " does not support this layout; espalier plan supports every layout")});
  if (options.shard == Sharding::full && verb.letter == 'l')
    throw UnsupportedError({"--shard", "none or optimizer", name_of(options.shard),
                            "sampling reads all weights for every token, so they would be gathered once per token"});
  if (options.shard != Sharding::optimizer) return;
  if (verb.letter != 't')
    throw UnsupportedError({"--shard", verb.letter == 'l' ? "none" : "none or full", name_of(options.shard), ""});
  if (options.ep > options.tp)
    throw UnsupportedError({"--shard", "none or full, because experts are sharded over dp", name_of(options.shard),
                            "use --shard full, which also shards experts, or --ep of at most --tp"});
}

}  // namespace

void RunRanks::begin(const Verb& verb) {
  begun_ = true;
  if (verb.letter == 'p' || !find_option("dp")->taken_by(verb.letter)) return;
  launch_ = launch_of_environment();
}

void RunRanks::meet(double timeout) {
  if (!several() || looked_) return;
  looked_ = true;
  processes_ = std::make_unique<Processes>(launch_, timeout);
}

std::string RunRanks::restart_point(const Verb& verb, const Options& options) const {
  return launch_.restarts > 0 && !launch_.run.empty() ? saved_point(verb, options) : "";
}

std::string RunRanks::saved_point(const Verb& verb, const Options& options) const {
  const bool loop = verb.letter == 'l';
  const std::string& out = loop && options.out.empty() ? options.resume : options.out;
  if (out.empty() || (!loop && verb.letter != 't')) return "";
  if (launch_.run.empty() && options.overwrite) return "";  // it may be what another run left
  const std::filesystem::path state = std::filesystem::path(out) / (loop ? "run.json" : "espalier/state.json");
  if (!std::filesystem::exists(state)) return "";
  const Json told = loop ? read_json_object(state) : Json::parse(read_run_state(out).extra);
  return told.value(loop ? "launch" : "run", "") == launch_.run ? out : "";
}

void RunRanks::check(const Verb& verb, const Options& options, const std::vector<std::string>& words) const {
  if (verb.letter == 'p' || !find_option("dp")->taken_by(verb.letter)) return;
  refuse_unsupported(verb, options);
  const Degrees degrees = degrees_of(options);
  check_degrees(degrees);
  const bool found = options.layout == LayoutChoice::automatic;
  if (found && !(degrees == Degrees{}))
    throw OptionError(
        {"--layout", "auto, or degrees", "auto with " + text_of_degrees(degrees), "leave one of them out"});
  if (found || degrees.ranks() == launch_.ranks) {
    for (const std::string& path : split_paths(options.rollouts))
      if (several() && path == "-")
        throw OptionError(
            {"--rollouts", "files that every rank can read", "standard input", "write it to a file first"});
    return;
  }
  const std::string product =
      text_of(degrees.ranks(), " process", degrees.ranks() == 1 ? "" : "es", " for ", text_of_degrees(degrees));
  if (!several())
    throw OptionError({"parallel degrees", product, "one",
                       "start it with: " + command_with_ranks(degrees.ranks(), this_program(), words)});
  throw OptionError({"parallel degrees", product, text_of(launch_.ranks, " from ", launch_.launcher),
                     "the product of --tp, --cp, --pp and --dp must be the number of processes"});
}

void RunRanks::choose_layout(const Verb& verb, Options& options, Progress& progress) {
  if (options.layout == LayoutChoice::given || verb.letter == 'p') return;
  options.layout = LayoutChoice::given;
  if (!several()) return;
  const Json told = Json::parse(processes_->told_by_rank_0("layout", [&] {
    const FoundDegrees found = find_degrees(options, verb.letter, launch_.ranks, launch_.local_ranks, progress);
    progress.note("note: --layout auto: " + found.reason);
    return Json({found.degrees.tp, found.degrees.cp, found.degrees.pp, found.degrees.dp, found.degrees.ep}).dump();
  }));
  std::size_t next = 0;
  for (std::int64_t* degree : {&options.tp, &options.cp, &options.pp, &options.dp, &options.ep})
    *degree = told[next++].get<std::int64_t>();
}

const Mesh& RunRanks::connect(const Verb& verb, const Options& options) {
  if (!several()) return mesh_of_one();
  const Mesh& mesh = processes_->connect(degrees_of(options));
  Json told = options_to_json(options, verb.letter);
  told.erase("threads");
  require_same(mesh.world, "options", text_of(ESPALIER_VERSION, told.dump()),
               "give every rank the same command, --config and version of Espalier");
  return mesh;
}

bool RunRanks::shows_error() {
  try {
    if (!begun_) return launch_of_environment().speaks();
    meet(Processes::kStart);  // options of this rank alone may be wrong
    return !processes_ || processes_->is_first_to_fail();
  } catch (const OptionError&) {         // nobody knows who this is
  } catch (const CommunicationError&) {  // nor whether others know more
  }
  return true;
}

}  // namespace espalier::cli
