// The words of the command line, turned into a verb, settings and arguments. Nothing is run or printed here.
#pragma once

#include <string>
#include <vector>

#include "cli/verbs.h"
#include "espalier/settings/settings.h"

namespace espalier::cli {

struct CommandLine {
  const Verb* verb = nullptr;  // null: none was named, which only --help and --version allow
  bool help = false, help_all = false, version = false;
  std::string help_word;  // --help WORD: what is searched for
  bool json = false, quiet = false, dry_run = false, print_config = false;
  std::string config;                   // path of a TOML file; empty: none
  std::vector<OptionSetting> settings;  // of the command line, in table order
  std::vector<std::string> arguments;
};

// Fills `line` from argv without the program's name; after an error it holds the verb, if one was recognised.
// An unknown verb or option is an OptionError with the nearest known name.
void parse_command_line(const std::vector<std::string>& words, CommandLine& line);

// True if --json stands among the words: errors found while parsing must know it, too.
bool asks_for_json(const std::vector<std::string>& words);

}  // namespace espalier::cli
