// The table as text: the help of a verb and docs/options.md.
#pragma once

#include <string>
#include <vector>

#include "espalier/options/options.h"

namespace espalier {

// The options that `verb` (a letter of the table) takes, by section: name, what it takes, help, default and unit.
// Lines of at most `width` characters where words allow.
std::string option_help(char verb, std::size_t width = 100);

// The same for the options that most people need (a capital letter in the table), without sections: 30 lines with the
// rest of --help. Degrees of parallelism share one entry; defaults that the meaning explains ("0: ...") are left out.
std::string short_option_help(char verb, std::size_t width = 110);

// The section that an option is shown in. Options that exist for TRL's formulas alone, which TRL's names set, stand in
// one of their own, behind the others.
const char* section_of(const OptionRow& row);

// The entries of option_help, without sections, for options with `word` in the name, the meaning, the choices, the
// section, or the names in TRL, verl and other trainers. "" if it is not found. `verb` '\0': options of all verbs,
// which are named.
std::string option_search(char verb, const std::string& word, std::size_t width = 100);

// The meaning of a row for one verb, and for all of them: "{tr|the file}{l|each batch}" of the table's help is
// "the file" for train, and "the file (train, replay), each batch (grpo)" for all.
std::string meaning_for(const OptionRow& row, char verb);
std::string meaning_for_all(const OptionRow& row);

// The verbs behind the letters of the table, in the order in which they are listed.
struct VerbName {
  char letter;
  const char* name;
};
const std::vector<VerbName>& verb_names();

// All options as a Markdown page: a table a section, with the verbs that take each. docs/options.md is this text.
std::string option_docs();

}  // namespace espalier
