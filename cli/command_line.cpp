#include "cli/command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>

#include "espalier/base/error.h"
#include "espalier/options/nearest_option.h"
#include "espalier/options/option_value.h"
#include "espalier/settings/trl_names.h"

namespace espalier::cli {
namespace {

std::string underscored(std::string name) {
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

std::string both_spellings(const std::string& name) {
  std::string dashed = name;
  std::replace(dashed.begin(), dashed.end(), '_', '-');
  const std::string field = underscored(name);
  return "--" + dashed + (field == dashed ? "" : ",--" + field);
}

bool takes_alias(const Verb& verb, const std::string& alias) {
  for (const std::string& target : alias_targets(alias))
    if (find_option(target)->taken_by(verb.letter)) return true;
  return false;
}

std::string help_of(const Verb* verb) {
  return std::string("espalier ") + (verb ? verb->name : "VERB") + " --help lists the options";
}

const Verb& verb_named(const std::string& name) {
  std::vector<std::string> names;
  for (const Verb& verb : verbs()) {
    if (name == verb.name) return verb;
    names.push_back(verb.name);
  }
  const std::string near = nearest_name(name, names);
  std::string known;
  for (const std::string& each : names) known += (known.empty() ? "one of " : ", ") + each;
  throw OptionError({"verb", known, '"' + name + '"', near.empty() ? "" : "did you mean " + near + "?"});
}

constexpr std::array kProgramOptions = {"help", "help-all", "json", "quiet", "config", "dry-run", "print-config"};

// "generate, grpo": the verbs that an option belongs to.
std::string verbs_taking(const OptionRow& row) {
  std::string out;
  for (const Verb& verb : verbs())
    if (row.taken_by(verb.letter)) out += (out.empty() ? "" : ", ") + std::string(verb.name);
  return out;
}

[[noreturn]] void refuse_option(const Verb& verb, const std::string& word) {
  const std::string shown = word.substr(0, word.find('='));
  const std::string name = underscored(shown.substr(std::min(shown.find_first_not_of('-'), shown.size())));
  const std::string expected = std::string("an option of ") + verb.name;
  std::vector<std::string> names(kProgramOptions.begin(), kProgramOptions.end()), others;
  for (const OptionRow& row : option_rows()) {
    if (name == row.field) throw OptionError({shown, expected, "an option of " + verbs_taking(row), help_of(&verb)});
    (row.taken_by(verb.letter) ? names : others).push_back(row.name);
  }
  std::string remedy = help_of(&verb);
  if (const std::string near = nearest_option(name, names); !near.empty())
    remedy = "did you mean --" + near + "?";
  else if (const std::string other = nearest_option(name, others); !other.empty())
    remedy = "did you mean --" + other + "? It is an option of " + verbs_taking(*find_option(other));
  throw OptionError({shown, expected, '"' + shown + '"', remedy});
}

// Words that no option took: arguments, and words that look like options but are none. After "--" all are arguments.
std::vector<std::string> arguments_among(const Verb& verb, const std::vector<std::string>& rest) {
  std::vector<std::string> arguments;
  bool only_arguments = false;
  for (const std::string& word : rest) {
    if (!only_arguments && word == "--")
      only_arguments = true;
    else if (!only_arguments && word.size() > 1 && word[0] == '-')
      refuse_option(verb, word);
    else
      arguments.push_back(word);
  }
  return arguments;
}

void check_arguments(const Verb& verb, const std::vector<std::string>& arguments) {
  if (arguments.size() >= verb.least && arguments.size() <= verb.most) return;
  const bool none = verb.most == 0;
  throw OptionError({verb.name, none ? "options only" : std::string(verb.arguments),
                     arguments.empty() ? "nothing" : '"' + arguments.back() + '"' + (none ? "" : " last"),
                     std::string("espalier ") + verb.name + " --help shows the usage"});
}

// The parser of one verb: an option for each row of the table that the verb takes, and for each of TRL's names.
class VerbParser {
 public:
  VerbParser(const Verb& verb, CommandLine& line) : verb_(verb), line_(line) {
    app_.set_help_flag();
    app_.allow_extras();
    for (const OptionRow& row : option_rows())
      if (row.taken_by(verb.letter)) add(row.name, row.type, path_role(row, verb.letter) == PathRole::models);
    for (const std::string& alias : alias_names())
      if (takes_alias(verb, alias)) add(alias, OptionType::text);
    app_.add_flag("--json", line_.json);
    app_.add_flag("--quiet", line_.quiet);
    app_.add_flag("--dry-run", line_.dry_run);
    app_.add_flag("--print-config", line_.print_config);
    config_ = app_.add_option("--config")->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  }

  void parse(std::vector<std::string> words) {
    std::reverse(words.begin(), words.end());  // CLI11 takes them from the back
    try {
      app_.parse(words);
    } catch (const CLI::ParseError& error) {
      refuse(error.what());
    }
    for (const Known& known : options_)
      if (known.option->count() > 0) line_.settings.push_back({known.name, value_of(known), ""});
    if (config_->count() > 0) line_.config = value_of({"config", OptionType::text, false, config_});
    line_.arguments = arguments_among(verb_, app_.remaining());
    if (!line_.print_config) check_arguments(verb_, line_.arguments);
  }

 private:
  struct Known {
    std::string name;
    OptionType type;
    bool named;  // values with names, each given by itself
    CLI::Option* option;
  };

  void add(const std::string& name, OptionType type, bool named = false) {
    const bool flag = type == OptionType::flag;
    CLI::Option* option = flag ? app_.add_flag(both_spellings(name)) : app_.add_option(both_spellings(name));
    if (type == OptionType::paths)
      option->expected(1, CLI::detail::expected_max_vector_size)->allow_extra_args();
    else if (!flag)
      option->expected(1);
    options_.push_back({name, type, named, option->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)});
  }

  // All values of a list or of paths, the one value of any other. An option followed by another one has lost its value.
  std::string value_of(const Known& known) const {
    const CLI::Option& option = *known.option;
    const std::vector<std::string> values = option.reduced_results();
    const bool paths = known.type == OptionType::paths || known.named;
    const bool several = known.type == OptionType::list || paths;
    if (values.size() > 1 && !several)
      throw OptionError({option.get_name(), "one value", "\"" + values[0] + "\" and \"" + values[1] + '"',
                         "give it once; only list options may be repeated"});
    std::string out;
    for (const std::string& value : values) {
      if (value.rfind("--", 0) == 0) refuse(option.get_name() + ": followed by " + value);
      if (!out.empty()) out += paths ? kBetweenPaths : ',';
      out += value;
    }
    return out;
  }

  // "--lr: 1 required TEXT missing" and the like: CLI11 names the option first.
  [[noreturn]] void refuse(const std::string& message) const {
    const std::string name = message.substr(0, message.find(':'));
    const OptionRow* row = name.size() > 2 ? find_option(name.substr(2)) : nullptr;
    if (!row) throw OptionError({"command line", "options with their values", message, help_of(&verb_)});
    throw OptionError({name, description_of(*row), "nothing", help_of(&verb_)});
  }

  const Verb& verb_;
  CommandLine& line_;
  CLI::App app_;
  CLI::Option* config_ = nullptr;
  std::vector<Known> options_;
};

bool is_help(const std::string& word) { return word == "--help" || word == "-h" || word == "--help-all"; }

// Fills `line` where help is asked for, anywhere before "--": "train --help", "train --help lr", "help train lr",
// "--help lr". What else stands there does not matter.
bool find_help(const std::vector<std::string>& words, CommandLine& line) {
  const auto end = std::find(words.begin(), words.end(), "--");
  auto at = words.front() == "help" ? words.begin() : std::find_if(words.begin(), end, is_help);
  if (at == end) return false;
  line.help = true;
  line.help_all = std::find(words.begin(), end, "--help-all") != end;
  line.json = asks_for_json(words);
  const auto is_verb = [](const std::string& word) {
    return std::ranges::find(verbs(), word, &Verb::name) != verbs().end();
  };
  if (at != words.begin()) line.verb = &verb_named(words.front());
  for (++at; at != end; ++at) {
    if (*at == "--json" || is_help(*at)) continue;
    if (at->starts_with('-')) break;
    if (!line.verb && is_verb(*at))
      line.verb = &verb_named(*at);
    else
      line.help_word += (line.help_word.empty() ? "" : " ") + *at;
  }
  return true;
}

}  // namespace

bool asks_for_json(const std::vector<std::string>& words) {
  const auto end = std::find(words.begin(), words.end(), "--");
  return std::find(words.begin(), end, "--json") != end;
}

void parse_command_line(const std::vector<std::string>& words, CommandLine& line) {
  if (words.empty()) throw OptionError({"command line", "a verb", "nothing", "espalier --help lists them"});
  if (find_help(words, line)) return;
  const std::string& first = words.front();
  if (first == "--version" || first == "-V") {
    line.version = true;
    line.json = asks_for_json(words);
    return;
  }
  if (first.size() > 1 && first[0] == '-')
    throw OptionError({"command line", "the verb first", '"' + first + '"', "espalier --help lists the verbs"});
  line.verb = &verb_named(first);
  VerbParser(*line.verb, line).parse({words.begin() + 1, words.end()});
}

}  // namespace espalier::cli
