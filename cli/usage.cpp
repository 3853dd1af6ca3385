#include "cli/usage.h"

#include <algorithm>
#include <sstream>

#include "espalier/base/error.h"
#include "espalier/options/nearest_option.h"
#include "espalier/settings/option_help.h"

namespace espalier::cli {
namespace {

std::string padded(std::string text, std::size_t width) {
  text.resize(std::max(width, text.size() + 1), ' ');
  return text;
}

// "--model PATH", "--frontier"
std::string named(const std::string& option) {
  return "--" + option + (find_option(option)->type == OptionType::flag ? "" : " PATH");
}

// "espalier train (--model PATH | --resume PATH) ... [options]" and what the verb does.
std::string head_of(const Verb& verb) {
  std::string usage = std::string("espalier ") + verb.name;
  for (const std::string& required : verb.required) {
    std::string alternatives;
    std::istringstream names(required);
    for (std::string name; std::getline(names, name, '|');)
      alternatives += (alternatives.empty() ? "" : " | ") + named(name);
    usage += required.find('|') == required.npos ? ' ' + alternatives : " (" + alternatives + ")";
  }
  if (verb.arguments[0] != '\0') usage += std::string(" ") + verb.arguments;
  return usage + " [options]\n\n" + verb.summary + "\n";
}

std::int64_t options_of(const Verb& verb) {
  return std::ranges::count_if(option_rows(), [&](const OptionRow& row) { return row.taken_by(verb.letter); });
}

}  // namespace

std::string program_usage() {
  std::string out =
      "Espalier: the training side of LLM reinforcement learning with every shared prompt computed once, exactly.\n\n"
      "espalier VERB [options]\n\n";
  for (const Verb& verb : verbs())
    out += "  " + padded(verb.name, 12) + padded(verb.arguments, 20) + verb.summary + '\n';
  return out +
         "\nespalier VERB --help shows its options, --help WORD searches them; espalier --version.\n"
         "Exit codes: 0 fine, 2 usage, 3 bad input, 4 not supported, 5 does not fit the memory budget,\n"
         "6 verification failed, 7 communication failed, 8 no such device, 70 internal error (please report).\n";
}

std::string verb_usage(const Verb& verb) {
  return head_of(verb) + "\n" + short_option_help(verb.letter) + "\n" + "--help-all shows all " +
         std::to_string(options_of(verb)) +
         " options, --help WORD searches them. For every verb: --config FILE, --json, --quiet,\n"
         "--dry-run (check everything, run nothing), --print-config (all options as TOML). Defaults in brackets.\n";
}

std::string full_verb_usage(const Verb& verb) {
  std::string usage = head_of(verb) + option_help(verb.letter) + "\nProgram:\n";
  for (const auto& [name, meaning] :
       {std::pair("--json", "one JSON object on stdout and nothing else there"),
        std::pair("--config FILE", "options from a TOML file; the command line wins"),
        std::pair("--print-config", "print all options as TOML that --config reads, and stop"),
        std::pair("--dry-run", "check options and input, print what would run, and stop"),
        std::pair("--quiet", "no progress and no notes on stderr"),
        std::pair("--help [WORD]", "the most used options, or the options that match WORD"),
        std::pair("--help-all", "this text")})
    usage += "  " + padded(name, 28) + meaning + '\n';
  return usage + "\nDefaults are in brackets. Option names may use '_' for '-'.\n";
}

std::string usage_of_word(const Verb* verb, const std::string& word) {
  const std::string found = option_search(verb ? verb->letter : '\0', word);
  if (!found.empty()) return found;
  const std::string elsewhere = verb ? option_search('\0', word) : "";
  std::vector<std::string> names;
  for (const Verb& known : verbs()) names.emplace_back(known.name);
  const std::string near = verb ? "" : nearest_name(word, names);
  throw OptionError(
      {"--help", "a word that occurs in the options" + (verb ? std::string(" of ") + verb->name : ""), '"' + word + '"',
       !near.empty()       ? "did you mean " + near + "?"
       : elsewhere.empty() ? (verb ? std::string("espalier ") + verb->name + " --help-all lists all options"
                                   : "espalier --help lists the verbs")
                           : "espalier --help " + word + " finds it in other verbs"});
}

}  // namespace espalier::cli
