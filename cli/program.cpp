#include "cli/program.h"

#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <new>

#include "cli/command_line.h"
#include "cli/dry_run.h"
#include "cli/former_run.h"
#include "cli/interrupt.h"
#include "cli/path_check.h"
#include "cli/ranks.h"
#include "cli/threads.h"
#include "cli/usage.h"
#include "espalier/base/error.h"
#include "espalier/base/instruction_set.h"
#include "espalier/device/cuda_library.h"
#include "espalier/machine/memory.h"
#include "espalier/machine/processors.h"
#include "espalier/measure/gpu_profile.h"
#include "espalier/metrics/progress_text.h"
#include "espalier/metrics/timer.h"
#include "espalier/options/objective_options.h"
#include "espalier/options/options_json.h"
#include "espalier/options/products.h"
#include "espalier/settings/config_file.h"
#include "espalier/settings/option_help.h"
#include "espalier/state/planning.h"

namespace espalier::cli {
namespace {

// The run as far as it is known; an error may come before most of it is.
struct Run {
  CommandLine line;
  Options options;
  Timer timer;
  RunRanks ranks;
  bool survives_closed_pipe = false;
  Json partial = Json::object();  // what a verb had to tell when it was interrupted
};

ProgressText::Output standard_error() {
  ProgressText::Output output;
  output.write = [](std::string_view text) { std::fwrite(text.data(), 1, text.size(), stderr); };
  output.seconds = Timer::steady_seconds;
  output.terminal = isatty(STDERR_FILENO) != 0;
  winsize size{};
  if (output.terminal && ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) output.width = size.ws_col;
  return output;
}

void check_required(const Verb& verb, const Options& options) {
  for (const std::string& required : verb.required) {
    bool given = false;
    std::string names;
    int count = 0;
    for (std::size_t begin = 0; begin <= required.size();) {
      const std::size_t end = std::min(required.find('|', begin), required.size());
      const std::string name = required.substr(begin, end - begin);
      const std::string value = option_text(options, name);
      given = given || (find_option(name)->type == OptionType::flag ? value == "true" : !value.empty());
      names += (names.empty() ? "--" : ", --") + name;
      ++count;
      begin = end + 1;
    }
    if (given) continue;
    const std::string first = "--" + required.substr(0, required.find('|'));
    throw OptionError({verb.name, (count > 1 ? "one of " : "") + names,
                       "no such option on the command line or in --config",
                       "add " + first + (count > 1 ? ", or another of these; espalier " : "; espalier ") + verb.name +
                           " --help lists the options"});
  }
}

// Binds the device of the run. Planning needs none: it may ask about machines that are not there.
void bind_device_of(const Verb& verb, const Options& options, const RunRanks& ranks) {
  if (verb.letter == 'p') return;
  if (options.device == DeviceType::cpu) {
    if (options.attention == AttentionKernels::automatic) return;
    const AttentionKernelsRow& asked = row_of(options.attention);
    if (!asked.on_cpu)
      throw OptionError({std::string("--attention ") + name_of(options.attention), "--device cuda", "--device cpu",
                         "use --attention own or flash there"});
    if (asked.composed) bind_device(flash_cpu_device());
    return;
  }
  bind_device(open_cuda_device({.index = ranks.local_rank(),
                                .attention = options.attention,
                                .deterministic = options.deterministic == OnOff::on,
                                .emulated = options.device == DeviceType::emulate,
                                .fastest = fastest_attention}));
}

void resolve_options(Run& run, Progress& progress) {
  const Verb& verb = *run.line.verb;
  std::vector<std::string> notes, names;
  for (const VerbName& known : verb_names()) names.push_back(known.name);
  std::vector<OptionSetting> config;
  run.options = default_options(verb.letter);
  if (!run.line.config.empty()) config = read_config(run.line.config, verb.name, verb.letter, names);
  apply_settings(run.options, config, notes);
  apply_settings(run.options, run.line.settings, notes);
  if (const std::string saved = run.ranks.restart_point(verb, run.options); !saved.empty()) {
    run.options.resume = saved;
    run.options.overwrite = false;  // what this very run wrote is continued
    progress.note("started again by the launcher: continues from " + saved);
  }
  if (verb.letter == 't' && !run.options.resume.empty()) {
    const std::string directory = run.options.resume;
    run.options = {};
    apply_former_run(run.options, directory);
    const std::string told = told_by_former_run(run.options);
    if (!told.empty()) notes.push_back("as " + directory + " was trained, unless said otherwise: " + told);
    std::vector<std::string> said_before;
    apply_settings(run.options, config, said_before);
    apply_settings(run.options, run.line.settings, said_before);
    run.options.resume = directory;
  }
  for (const std::string& note : notes) progress.note("note: " + note);
  validate(run.options);
  settle_objective(run.options);
  if (run.options.threads == 0) run.options.threads = usable_threads(run.ranks.local());
}

void check_options(const Verb& verb, const Run& run, const std::vector<std::string>& words) {
  check_required(verb, run.options);
  run.ranks.check(verb, run.options, words);
  bind_device_of(verb, run.options, run.ranks);
  if (run.ranks.talks()) check_paths(verb, run.options, run.line.arguments, run.line.config);
  instruction_level();  // a wrong ESPALIER_INSTRUCTION_SET is reported here, not out of a kernel's threads
  choose_products(run.options);
}

// The fields that every object has, before the fields of the verb or of the error.
Json common_fields(const Run& run) {
  Json json;
  json["espalier"] = ESPALIER_VERSION;
  json["verb"] = run.line.verb ? Json(run.line.verb->name) : Json(nullptr);
  json["device"] = name_of(run.options.device);
  json["dtype"] = name_of(run.options.dtype);
  json["threads"] = run.options.threads > 0 ? run.options.threads : usable_threads();
  json["options"] = options_to_json(run.options, run.line.verb ? run.line.verb->letter : '\0');
  json["seconds"] = run.timer.total();
  json["peak_bytes"] = peak_resident_bytes();
  return json;
}

void print_json(const Json& json) {
  // Paths may hold bytes that are no UTF-8; JSON may not.
  std::cout << json.dump(2, ' ', false, Json::error_handler_t::replace) << '\n';
}

std::string help_text(const CommandLine& line) {
  if (!line.help_word.empty()) return usage_of_word(line.verb, line.help_word);
  if (!line.verb) return program_usage();
  return line.help_all ? full_verb_usage(*line.verb) : verb_usage(*line.verb);
}

void print_help(const CommandLine& line) {
  const std::string text = line.help ? help_text(line) : std::string("espalier ") + ESPALIER_VERSION + '\n';
  if (!line.json)
    std::cout << text;
  else if (line.help)
    print_json({{"espalier", ESPALIER_VERSION}, {"help", text}});
  else
    print_json({{"espalier", ESPALIER_VERSION}});
}

int run_verb(Run& run, const std::vector<std::string>& words) {
  const Verb& verb = *run.line.verb;
  run.ranks.begin(verb);
  const bool talks = run.ranks.talks();
  ProgressText shown(standard_error());
  NoProgress hidden;
  InterruptibleProgress progress(run.line.quiet || !talks ? static_cast<Progress&>(hidden) : shown);
  resolve_options(run, progress);
  if (run.line.print_config) {
    if (talks) std::cout << config_text(run.options, verb.name, verb.letter);
    return 0;
  }
  run.ranks.meet(run.options.comm_timeout);
  check_options(verb, run, words);
  use_threads(static_cast<int>(run.options.threads));
  // The reader of the output may leave; a run that writes files goes on without it.
  if (has_output(*run.line.verb, run.options, run.line.arguments)) run.survives_closed_pipe = true;
  if (run.survives_closed_pipe) signal(SIGPIPE, SIG_IGN);
  std::ostream nowhere(nullptr);
  std::ostream& text = run.line.json || !talks ? nowhere : std::cout;
  run.ranks.choose_layout(verb, run.options, progress);
  const Mesh& mesh = run.ranks.connect(verb, run.options);
  (void)budget_of(run.options, mesh.local_ranks);  // made before anything is loaded
  Context context{run.options, run.line.arguments, progress, text, mesh};
  int code = 0;
  try {
    code = run.line.dry_run ? dry_run(verb, context) : verb.run(context);
    mesh.world.wait_for_all();
  } catch (const Interrupted&) {
    progress.end();
    run.partial = context.result;
    throw;
  } catch (...) {
    progress.end();  // takes the bar away before the message is printed
    throw;
  }
  if (run.line.json && talks) {
    Json json = common_fields(run);
    json.update(context.result);
    print_json(json);
  }
  return code;
}

// A caller that shows the error of the --json object itself, as the Python package does.
bool told_as_object() {
  const char* const errors = std::getenv("ESPALIER_ERRORS");
  return errors != nullptr && std::string_view(errors) == "object";
}

std::string continue_with(const Run& run, const std::string& saved) {
  return "continue with: " + continuing_command(run.line.verb->letter, run.line.settings, run.line.config, saved);
}

// How a run goes on that lost a rank; "" where it has saved nothing.
std::string command_after_failure(const Run& run) {
  if (!run.line.verb) return "";
  try {
    const std::string saved = run.ranks.saved_point(*run.line.verb, run.options);
    return saved.empty() ? "" : continue_with(run, saved);
  } catch (const Error&) {  // the first error is the one to tell
    return "";
  }
}

// Two or three lines for a person on stderr; with --json the object for a program on stdout, too.
int report(Run& run, bool as_json, const char* kind, int code, ErrorText text) {
  if (!run.ranks.shows_error()) return code;
  if (code == CommunicationError::kExitCode) {
    if (const std::string silent = run.ranks.silent_ranks(); !silent.empty()) text.got += "; no word from " + silent;
    if (const std::string command = command_after_failure(run); !command.empty())
      text.remedy += (text.remedy.empty() ? "" : "; ") + command;
  }
  if (as_json) {
    Json json = common_fields(run);
    json.update(run.partial);
    json["error"] = {
        {"kind", kind}, {"where", text.where}, {"expected", text.expected}, {"got", text.got}, {"remedy", text.remedy}};
    json["exit_code"] = code;
    print_json(json);
  }
  std::string out = std::string("espalier") + (run.line.verb ? std::string(" ") + run.line.verb->name : "") + ": " +
                    kind + " error" + (text.where.empty() ? "" : " at " + text.where) + '\n';
  out += "  " + (text.expected.empty() ? text.got : "expected " + text.expected + ", got " + text.got) + '\n';
  if (!text.remedy.empty()) out += "  " + text.remedy + '\n';
  std::cout.flush();
  if (!as_json || !told_as_object()) std::cerr << out;
  return code;
}

ErrorText told_of(const Run& run, const Interrupted& interrupted) {
  ErrorText text{"", "", "stopped by a signal", ""};
  if (!interrupted.done.empty()) text.got += ' ' + interrupted.done;
  if (!interrupted.saved.empty()) text.remedy = continue_with(run, interrupted.saved);
  return text;
}

bool reader_has_left() {
  pollfd out{STDOUT_FILENO, POLLOUT, 0};
  return poll(&out, 1, 0) == 1 && (out.revents & POLLERR) != 0;
}

int run_words(Run& run, const std::vector<std::string>& words) {
  parse_command_line(words, run.line);
  int code = 0;
  if (run.line.help || run.line.version)
    print_help(run.line);
  else
    code = run_verb(run, words);
  if (!std::cout.flush() && !(run.survives_closed_pipe && reader_has_left()))
    throw WriteError({"stdout", "the result written", "a failed write", "is the disk full?"});
  return code;
}

}  // namespace

int run_program(const std::vector<std::string>& words) {
  constexpr int kInternal = 70;
  const char* kReport = "please report this with the command line";
  const MemoryBudgetError no_memory({"", "memory from the system", "a refusal",
                                     "give --memory-budget what there is, or raise the limit (ulimit -v)"});
  Run run;
  const bool as_json = asks_for_json(words);
  try {
    return run_words(run, words);
  } catch (const Error& error) {
    return report(run, as_json, error.kind(), error.exit_code(), error.text());
  } catch (const Interrupted& interrupted) {
    return report(run, as_json, "interrupt", interrupted.exit_code(), told_of(run, interrupted));
  } catch (const std::bad_alloc&) {
    return report(run, as_json, no_memory.kind(), no_memory.exit_code(), no_memory.text());
  } catch (const std::exception& error) {
    // libtorch throws no class of its own where the system refuses memory.
    if (std::string_view(error.what()).find("allocate memory") != std::string_view::npos)
      return report(run, as_json, no_memory.kind(), no_memory.exit_code(), no_memory.text());
    return report(run, as_json, "internal", kInternal, {"", "", error.what(), kReport});
  }
}

}  // namespace espalier::cli
