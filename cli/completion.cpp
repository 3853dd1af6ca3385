// `completion bash|zsh|fish`: a script for the shell, made from the tables of verbs and options.
#include <sstream>

#include "cli/verbs.h"
#include "espalier/base/error.h"
#include "espalier/settings/option_help.h"

namespace espalier::cli {
namespace {

struct ProgramOption {
  const char *name, *meaning;
};
constexpr ProgramOption kProgramOptions[] = {{"help", "the most used options"},
                                             {"help-all", "every option"},
                                             {"json", "one JSON object on stdout"},
                                             {"quiet", "no progress and no notes"},
                                             {"dry-run", "check everything, run nothing"},
                                             {"print-config", "all options as TOML"}};

// "a b c" for the choices "a|b|c".
std::string words_of(std::string choices) {
  for (char& c : choices) c = c == '|' ? ' ' : c;
  return choices;
}

bool is_flag(const OptionRow& row) { return row.type == OptionType::flag; }
bool has_words(const OptionRow& row) { return row.type == OptionType::text && row.range[0] != '\0'; }

std::string names_of_verbs() {
  std::string out;
  for (const Verb& verb : verbs()) out += (out.empty() ? "" : " ") + std::string(verb.name);
  return out;
}

// Without what a shell would take for its own.
std::string plain(const std::string& text, std::string_view unwanted) {
  std::string out;
  for (const char c : text) out += unwanted.find(c) == unwanted.npos ? c : ' ';
  return out;
}

std::string bash_script() {
  std::ostringstream out;
  out << "# source <(espalier completion bash)\n_espalier() {\n"
         "  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} words=\n  COMPREPLY=()\n"
         "  if [ \"$COMP_CWORD\" -eq 1 ]; then\n    COMPREPLY=($(compgen -W \""
      << names_of_verbs()
      << " --help --version\" -- \"$current\"))\n    return\n  fi\n"
         "  case $previous in\n";
  std::string values, paths = "--config";
  for (const OptionRow& row : option_rows()) {
    if (has_words(row))
      out << "    --" << row.name << ") words=\"" << words_of(row.range) << "\" ;;\n";
    else if (row.is_path())
      paths += std::string("|--") + row.name;
    else if (!is_flag(row))
      values += (values.empty() ? "--" : "|--") + std::string(row.name);
  }
  out << "    " << paths
      << ") compopt -o filenames; COMPREPLY=($(compgen -f -- \"$current\")); return ;;\n"
         "    "
      << values << ") return ;;\n  esac\n  if [ -z \"$words\" ]; then\n"
      << "    if [[ $current != -* && ${COMP_WORDS[1]} != completion ]]; then\n"
         "      compopt -o filenames; COMPREPLY=($(compgen -f -- \"$current\")); return\n    fi\n"
         "    case ${COMP_WORDS[1]} in\n      completion) words=\"bash zsh fish\" ;;\n";
  for (const Verb& verb : verbs()) {
    if (verb.run == run_completion) continue;
    out << "      " << verb.name << ") words=\"--config";
    for (const ProgramOption& option : kProgramOptions) out << " --" << option.name;
    for (const OptionRow& row : option_rows())
      if (row.taken_by(verb.letter)) out << " --" << row.name;
    out << "\" ;;\n";
  }
  out << "    esac\n  fi\n  COMPREPLY=($(compgen -W \"$words\" -- \"$current\"))\n}\n"
         "complete -F _espalier espalier\n";
  return out.str();
}

std::string zsh_script() {
  std::ostringstream out;
  out << "#compdef espalier\n# source <(espalier completion zsh), or keep it as _espalier in a folder of $fpath\n"
         "_espalier() {\n  local -a verbs\n  verbs=(";
  for (const Verb& verb : verbs()) out << "\n    '" << verb.name << ":" << plain(verb.summary, "':") << "'";
  out << ")\n  if (( CURRENT == 2 )); then\n    _describe verb verbs\n    return\n  fi\n"
         "  local verb=$words[2]\n  shift words\n  (( CURRENT-- ))\n  case $verb in\n"
         "    completion) _arguments '1:shell:(bash zsh fish)' ;;\n";
  for (const Verb& verb : verbs()) {
    if (verb.run == run_completion) continue;
    out << "    " << verb.name
        << ")\n      _arguments '*:file:_files' '--config[options from a TOML file]:file:_files'";
    for (const ProgramOption& option : kProgramOptions) out << " '--" << option.name << "[" << option.meaning << "]'";
    for (const OptionRow& row : option_rows()) {
      if (!row.taken_by(verb.letter)) continue;
      out << " \\\n        '--" << row.name << "[" << plain(meaning_for(row, verb.letter), "'[]:") << "]";
      if (has_words(row))
        out << ":word:(" << words_of(row.range) << ")";
      else if (!is_flag(row))
        out << (row.is_path() ? ":path:_files" : ":value:");
      out << "'";
    }
    out << " ;;\n";
  }
  out << "  esac\n}\n"
         "if [ \"$funcstack[1]\" = _espalier ]; then _espalier; else compdef _espalier espalier; fi\n";
  return out.str();
}

std::string fish_script() {
  std::ostringstream out;
  out << "# espalier completion fish | source\n";
  for (const Verb& verb : verbs())
    out << "complete -c espalier -n __fish_use_subcommand -f -a " << verb.name << " -d '" << plain(verb.summary, "'")
        << "'\n";
  for (const Verb& verb : verbs()) {
    const std::string at = std::string("complete -c espalier -n '__fish_seen_subcommand_from ") + verb.name + "' ";
    if (verb.run == run_completion) {
      out << at << "-f -a 'bash zsh fish'\n";
      continue;
    }
    out << at << "-l config -r -F -d 'options from a TOML file'\n";
    for (const ProgramOption& option : kProgramOptions)
      out << at << "-l " << option.name << " -d '" << option.meaning << "'\n";
    for (const OptionRow& row : option_rows()) {
      if (!row.taken_by(verb.letter)) continue;
      out << at << "-l " << row.name;
      if (has_words(row))
        out << " -x -a '" << words_of(row.range) << "'";
      else if (!is_flag(row))
        out << (row.is_path() ? " -r -F" : " -x");
      out << " -d '" << plain(meaning_for(row, verb.letter), "'") << "'\n";
    }
  }
  return out.str();
}

}  // namespace

int run_completion(Context& context) {
  const std::string& shell = context.arguments.front();
  if (shell != "bash" && shell != "zsh" && shell != "fish")
    throw OptionError({"completion", "bash, zsh or fish", '"' + shell + '"', ""});
  const std::string script = shell == "bash" ? bash_script() : shell == "zsh" ? zsh_script() : fish_script();
  context.result["script"] = script;
  context.text << script;
  return 0;
}

}  // namespace espalier::cli
