// The table as text: the help of a verb and docs/options.md.
#pragma once

#include <string>
#include <vector>

namespace espalier {

// The options that `verb` (a letter of the table) takes, by section: name, what it takes, help, default and unit.
// Lines of at most `width` characters where words allow.
std::string option_help(char verb, std::size_t width = 100);

// The verbs behind the letters of the table, in the order in which they are listed.
struct VerbName {
  char letter;
  const char* name;
};
const std::vector<VerbName>& verb_names();

// All options as a Markdown page: a table a section, with the verbs that take each. docs/options.md is this text.
std::string option_docs();

}  // namespace espalier
