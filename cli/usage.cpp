#include "cli/usage.h"

#include <algorithm>

#include "espalier/options/option_help.h"

namespace espalier::cli {
namespace {

std::string padded(std::string text, std::size_t width) {
  text.resize(std::max(width, text.size() + 1), ' ');
  return text;
}

}  // namespace

std::string program_usage() {
  std::string out =
      "Espalier: the training side of LLM reinforcement learning with every shared prompt computed once, exactly.\n\n"
      "espalier VERB [options]\n\n";
  for (const Verb& verb : verbs())
    out += "  " + padded(verb.name, 10) + padded(verb.arguments, 13) + verb.summary + '\n';
  return out +
         "\nespalier VERB --help lists the options with their defaults and units; espalier --version.\n"
         "Exit codes: 0 fine, 2 usage, 3 bad input, 4 not supported, 5 does not fit the memory budget,\n"
         "6 verification failed, 7 communication failed, 8 no such device, 70 internal error (please report).\n";
}

std::string verb_usage(const Verb& verb) {
  std::string usage = std::string("espalier ") + verb.name;
  for (const std::string& required : verb.required) {
    std::string alternatives;
    for (const char c : required) alternatives += c == '|' ? std::string(" | --") : std::string(1, c);
    const bool several = alternatives.size() > required.size();
    usage += std::string(several ? " (--" : " --") + alternatives + (several ? ")" : "") + " PATH";
  }
  if (verb.arguments[0] != '\0') usage += std::string(" ") + verb.arguments;
  usage += std::string(" [options]\n\n") + verb.summary + '\n' + option_help(verb.letter) + "\nProgram:\n";
  for (const auto& [name, meaning] :
       {std::pair("--json", "one JSON object on stdout and nothing else there"),
        std::pair("--config FILE", "options from a TOML file; the command line wins"),
        std::pair("--quiet", "no progress and no notes on stderr"), std::pair("--help", "this text")})
    usage += "  " + padded(name, 28) + meaning + '\n';
  return usage + "\nDefaults stand in brackets. Names may be written with '_' for '-'.\n";
}

}  // namespace espalier::cli
