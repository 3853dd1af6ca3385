#include "espalier/settings/option_help.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <sstream>
#include <utility>

#include "espalier/options/nearest_option.h"
#include "espalier/options/option_value.h"
#include "espalier/settings/peft_names.h"
#include "espalier/settings/trl_names.h"

namespace espalier {
namespace {

constexpr const char* kTrlSection = "TRL's formulas";
constexpr std::array<std::string_view, 11> kTrlFormulas = {
    "ratio-cap",           "log-ratio-bound",     "vespo-weights",    "token-mean-divisor",
    "token-divisor-scale", "token-count-epsilon", "entropy-agg-mode", "off-policy-threshold",
    "rollout-is-floor",    "decay-matrices-only", "group-of-one"};

// A command of each section of docs/options.md.
constexpr std::array<std::pair<std::string_view, const char*>, 14> kExamples = {{
    {"Run", "espalier train --dtype bfloat16 --threads 16 --seed 1 --model M --rollouts r.jsonl --out OUT"},
    {"Input and output",
     "espalier train --model M --rollouts day1/ day2.jsonl.zst --out OUT --save-freq 10 --record TRACE"},
    {"Mini-batches", "espalier train --mini-batch-size 64 --epochs 2 --model M --rollouts r.jsonl --out OUT"},
    {"Schedule", "espalier train --memory-budget 16GiB --trunk-state offload --model M --rollouts r.jsonl --out OUT"},
    {"Objective",
     "espalier train --adv-estimator rloo --policy-loss gspo --kl-loss-coef 0.001 --model M --rollouts r.jsonl --out "
     "OUT"},
    {"Critic",
     "espalier train --adv-estimator gae --critic CRITIC --critic-lr 1e-5 --model M --rollouts r.jsonl --out OUT"},
    {"Optimizer",
     "espalier train --lr 1e-6 --warmup-steps 10 --lr-scheduler-type cosine --model M --rollouts r.jsonl --out OUT"},
    {"Adapters", "espalier train --lora-rank 16 --lora-alpha 32 --model M --rollouts r.jsonl --out ADAPTER"},
    {"Parallel degrees", "espalier plan --layout auto --ranks 64 --machine h100 --model M --rollouts r.jsonl"},
    {"Sampling", "espalier generate --n 8 --temperature 0.8 --top-p 0.95 --model M --prompts p.jsonl --out r.jsonl"},
    {"Closed loop",
     "espalier grpo --train-batch-size 32 --test-freq 20 --filter-groups --model M --prompts p.jsonl --reward "
     "reward.py --out RUN"},
    {"Server", "espalier serve --model base=MODEL --state STATE --port 8080"},
    {"Benchmark grid", "espalier bench --splits 1024/256,4096/128 --n 4,16 --repetitions 5 --model M"},
    {kTrlSection,
     "espalier train --loss-type dapo --beta 0.04 --epsilon-high 0.28 --model M --rollouts r.jsonl --out OUT"},
}};

// All rows, the rows of TRL's formulas last.
std::vector<const OptionRow*> rows_by_section() {
  std::vector<const OptionRow*> rows;
  for (const OptionRow& row : option_rows()) rows.push_back(&row);
  std::stable_partition(rows.begin(), rows.end(), [](const OptionRow* row) { return section_of(*row) != kTrlSection; });
  return rows;
}

bool is_degree(const OptionRow& row) { return std::strlen(row.name) == 2 && row.name[1] == 'p'; }

const char* word_of(const OptionRow& row) {
  switch (row.type) {
    case OptionType::number:
      return "X";
    case OptionType::integer:
      return "N";
    case OptionType::list:
      return "X,X";
    case OptionType::flag:
      return "";
    case OptionType::paths:
      return row.is_path() ? "PATH..." : "TEXT...";
    case OptionType::text:
      break;
  }
  if (has_choices(row)) return "WORD";
  const std::string_view unit = row.unit;
  return unit == "bytes" ? "SIZE" : row.is_path() ? "PATH" : "TEXT";
}

std::string default_of(const OptionRow& row, char verb = '\0') {
  if (row.type == OptionType::flag) return row.default_text == "true" ? "on" : "off";
  std::string text = option_text(default_options(verb), row.name);
  if (text.empty()) return "";
  if (row.unit[0] != '\0' && !row.is_path()) text += std::string(" ") + row.unit;
  return text;
}

// "text" in lines of at most `width`, each after `indent` spaces; the first line is begun by the caller.
std::string wrapped(const std::string& text, std::size_t indent, std::size_t width) {
  std::istringstream words(text);
  std::string out, word;
  std::size_t column = indent;
  while (words >> word) {
    if (column > indent && column + 1 + word.size() > width) {
      out.append("\n").append(indent, ' ');
      column = indent;
    }
    if (column > indent) out += ' ', ++column;
    out += word;
    column += word.size();
  }
  return out;
}

std::string with_spaces(std::string choices) {
  for (std::size_t at = 0; (at = choices.find('|', at)) != choices.npos; at += 3) choices.replace(at, 1, " | ");
  return choices;
}

// "  --lr X", then `text` from column kIndent on.
std::string entry_of(std::string head, const std::string& text, std::size_t width) {
  constexpr std::size_t kIndent = 30;
  head.resize(std::max(kIndent, head.size() + 1), ' ');
  if (head.size() > kIndent) head += '\n' + std::string(kIndent, ' ');
  return head + wrapped(text, kIndent, width) + '\n';
}

std::string head_of(const OptionRow& row) { return std::string("  --") + row.name + ' ' + word_of(row); }

// An option with choices, default and unit. `brief`: without a default that is no news.
std::string entry_of(const OptionRow& row, const std::string& meaning, char verb, std::size_t width,
                     bool brief = false) {
  std::string text = meaning;
  if (has_choices(row)) text += ": " + with_spaces(row.range);
  const std::string value = default_of(row, verb);
  const bool told = row.type == OptionType::flag || (value.starts_with('0') && meaning.find("0: ") != meaning.npos);
  if (!value.empty() && !(brief && told)) text += " [" + value + "]";
  return entry_of(head_of(row), text, width);
}

// "train, verify": the verbs among `letters`.
std::string verbs_among(const std::string& letters) {
  std::string out;
  for (const VerbName& verb : verb_names())
    if (letters.find(verb.letter) != letters.npos) out += (out.empty() ? "" : ", ") + std::string(verb.name);
  return out;
}

std::string verbs_of(const OptionRow& row) {
  std::string letters;
  for (const VerbName& verb : verb_names())
    if (row.taken_by(verb.letter)) letters += verb.letter;
  return verbs_among(letters);
}

// Calls common(text) and part(letters, text) for the pieces of a meaning, in their order.
template <class Common, class Part>
void for_each_piece(std::string_view help, const Common& common, const Part& part) {
  while (!help.empty()) {
    const std::size_t open = std::min(help.find('{'), help.size());
    common(help.substr(0, open));
    if (open == help.size()) return;
    const std::size_t bar = help.find('|', open), close = help.find('}', open);
    part(std::string(help.substr(open + 1, bar - open - 1)), std::string(help.substr(bar + 1, close - bar - 1)));
    help.remove_prefix(close + 1);
  }
}

std::string lower_case(std::string text) {
  for (char& c : text) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c == '_' ? '-' : c;
  return text;
}

// Everything of an option that a search looks through.
std::string searched_text(const OptionRow& row, const std::string& meaning) {
  std::string text = std::string(row.name) + '\n' + meaning + '\n' + row.range + '\n' + section_of(row) + '\n';
  for (const std::string& alias : alias_names()) {
    const std::vector<std::string> targets = alias_targets(alias);
    if (std::ranges::find(targets, row.name) != targets.end()) text += alias + '\n';
  }
  for (const std::string& other : names_elsewhere_of(row.name)) text += other + '\n';
  return lower_case(text);
}

std::string example_of(std::string_view section) {
  const auto found = std::ranges::find(kExamples, section, [](const auto& example) { return example.first; });
  return found == kExamples.end() ? "" : found->second;
}

}  // namespace

std::string meaning_for(const OptionRow& row, char verb) {
  std::string out;
  for_each_piece(
      row.help, [&](std::string_view text) { out += text; },
      [&](const std::string& letters, const std::string& text) {
        if (letters.find(verb) != letters.npos) out += text;
      });
  return out;
}

std::string meaning_for_all(const OptionRow& row) {
  std::string out;
  bool after_part = false;
  for_each_piece(
      row.help, [&](std::string_view text) { out += text, after_part = after_part && text.empty(); },
      [&](const std::string& letters, const std::string& text) {
        out += (after_part && !text.starts_with(';') ? ", " : "") + text + " (" + verbs_among(letters) + ")";
        after_part = true;
      });
  return out;
}

const char* section_of(const OptionRow& row) {
  return std::ranges::find(kTrlFormulas, std::string_view(row.name)) == kTrlFormulas.end() ? row.section : kTrlSection;
}

std::string option_help(char verb, std::size_t width) {
  std::string out;
  const char* section = nullptr;
  for (const OptionRow* row : rows_by_section()) {
    if (!row->taken_by(verb)) continue;
    if (!section || std::strcmp(section, section_of(*row)) != 0) {
      section = section_of(*row);
      out += std::string("\n") + section + (section == kTrlSection ? " (TRL's names set these):\n" : ":\n");
    }
    out += entry_of(*row, meaning_for(*row, verb), verb, width);
  }
  return out;
}

std::string short_option_help(char verb, std::size_t width) {
  std::string own, run, degrees;
  for (const OptionRow& row : option_rows()) {
    if (!row.in_short_help_of(verb)) continue;
    std::string& out = std::strcmp(row.section, "Run") == 0 ? run : own;
    if (is_degree(row))
      degrees += (degrees.empty() ? "" : ", ") + head_of(row).substr(degrees.empty() ? 0 : 2);
    else
      out += entry_of(row, meaning_for(row, verb), verb, width, true);
  }
  if (!degrees.empty()) own += entry_of(degrees, "tensor, expert, context, pipeline, data parallel degree [1]", width);
  return own + run;
}

std::string option_search(char verb, const std::string& word, std::size_t width) {
  std::string wanted = lower_case(word), out;
  wanted.erase(0, wanted.find_first_not_of('-'));
  for (const OptionRow& row : option_rows()) {
    if (verb != '\0' && !row.taken_by(verb)) continue;
    std::string meaning = verb == '\0' ? meaning_for_all(row) : meaning_for(row, verb);
    if (searched_text(row, meaning).find(wanted) == std::string::npos) continue;
    if (verb == '\0' && row.verbs[0] != '*') meaning = "(" + verbs_of(row) + ") " + meaning;
    out += entry_of(row, meaning, verb, width);
  }
  return out;
}

const std::vector<VerbName>& verb_names() {
  static const std::vector<VerbName> names = {{'i', "inspect"},  {'c', "convert"}, {'p', "plan"},   {'t', "train"},
                                              {'s', "score"},    {'v', "verify"},  {'b', "bench"},  {'r', "replay"},
                                              {'g', "generate"}, {'l', "grpo"},    {'o', "report"}, {'a', "merge"},
                                              {'e', "serve"},    {'x', "doctor"}};
  return names;
}

std::string option_docs() {
  std::string out =
      "# Options\n\nEvery option, its values and its default. On the command line an option is `--name value`; in a\n"
      "file given with `--config` it is `name = value` (TOML, at the top or in a table named after a verb; the\n"
      "command line wins). Sizes have a unit (8GiB); bf16, fp32 and fp64 are read as bfloat16, float32 and float64. "
      "This\n"
      "page is generated from `espalier/options/option_table.def` by `make docs`.\n";
  const char* section = nullptr;
  for (const OptionRow* each : rows_by_section()) {
    const OptionRow& row = *each;
    if (!section || std::strcmp(section, section_of(row)) != 0) {
      section = section_of(row);
      out += std::string("\n## ") + section + "\n\n";
      if (section == kTrlSection)
        out += "These exist for TRL's formulas. TRL's names, listed below, set them; give TRL's names instead.\n\n";
      out += "    " + example_of(section) + "\n\n| option | values | default | verbs | meaning |\n";
      out += "| --- | --- | --- | --- | --- |\n";
    }
    std::string values = has_choices(row) ? with_spaces(row.range) : description_of(row);
    for (std::size_t at = 0; (at = values.find(" | ", at)) != values.npos; at += 2) values.replace(at, 3, ", ");
    const std::string value = default_of(row);
    out += std::string("| `--") + row.name + "` | " + values + " | " + (value.empty() ? "" : '`' + value + '`') +
           " | " + (row.verbs[0] == '*' ? "all" : verbs_of(row)) + " | " + meaning_for_all(row) + " |\n";
  }
  const auto list = [&](const std::vector<std::string>& names) {
    for (const std::string& name : names) {
      std::string targets;
      for (const std::string& target : alias_targets(name))
        targets += (targets.empty() ? "`--" : ", `--") + target + '`';
      out += "| `" + name + "` | " + targets + " |\n";
    }
  };
  out += "\n## Names of TRL\n\nAccepted with a note, on the command line and in files:\n\n";
  out += "| TRL | read as |\n| --- | --- |\n";
  list(trl_names());
  out +=
      "\n## Names of peft and verl\n\nOther names of one option, of peft's LoraConfig, TRL's ModelConfig and verl's "
      "model "
      "configuration. `[a, b]` is read as `a,b`.\n\n| name | read as |\n| --- | --- |\n";
  std::vector<std::string> renamed;
  for (const auto& [name, option] : peft_names()) renamed.push_back(name);
  list(renamed);
  out += "\nRefused, unless they are off:";
  for (const RefusedPeftName& refused : refused_peft_names())
    out += (&refused == &refused_peft_names().front() ? " `" : ", `") + std::string(refused.name) + '`';
  return out + ".\n";
}

}  // namespace espalier
