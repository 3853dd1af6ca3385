// The resolved options of a run: one member per row of option_table.def, named like the row's field.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "espalier/options/choices.h"

namespace espalier {

namespace option_type {
using text = std::string;
using number = double;
using integer = std::int64_t;
using flag = bool;
using list = std::string;   // as written, "0.9,0.999"; see parse_numbers
using paths = std::string;  // with kBetweenPaths between them; see split_paths
#define ESPALIER_CHOICE(Type, words) using Type = Choice<espalier::Type>;
#define ESPALIER_WORD(name, word)
#include "espalier/options/choices.def"
using DType = Choice<espalier::DType>;
using AttentionKernels = Choice<espalier::AttentionKernels>;
using PolicyLoss = Choice<espalier::PolicyLoss>;
using KlLossType = Choice<espalier::KlLossType>;
}  // namespace option_type

struct Options {
#define ESPALIER_OPTION(field, name, type, value, range, unit, verbs, help) option_type::type field = value;
#include "espalier/options/option_table.def"
#undef ESPALIER_OPTION
};

// The defaults of a verb, a letter of the table.
Options default_options(char verb);

enum class OptionType { text, number, integer, flag, list, paths };

// The only byte that no path has.
inline constexpr char kBetweenPaths = '\0';
std::vector<std::string> split_paths(const std::string& text);

// A row of the table as data, for the command line, the help and the documentation.
struct OptionRow {
  const char* field;
  const char* name;
  OptionType type;
  std::string default_text;
  const char* range;
  const char* unit;
  const char* verbs;
  const char* help;
  const char* section;

  bool taken_by(char verb) const;          // a letter of the table's `verbs` column, in lower case
  bool in_short_help_of(char verb) const;  // it stands there as a capital letter
  bool is_path() const;                    // of something that is read or written, by the `unit` column
};

// How a verb uses the path that an option names. `models`: inputs with names (NAME=DIR), each given by itself;
// `records`: a file that is replaced only with --overwrite; `folder`: one that is replaced as a whole; `run`: a folder
// that grows and is continued in place.
enum class PathRole { none, input, models, output_file, output_records, output_folder, output_run };
PathRole path_role(const OptionRow& row, char verb);

const std::vector<OptionRow>& option_rows();

// The row of a name, written with '-' or '_', without leading dashes; null: there is none.
const OptionRow* find_option(std::string_view name);

// Sets one option from text; other spellings of a choice (bf16) are read as the table's. Errors: OptionError with the
// option's name, what it takes and what was given; for a name that does not exist the nearest one that does. `where`
// stands before the name in the message ("run.toml:3: ").
void set_option(Options& options, const std::string& name, const std::string& value);
void set_option(Options& options, const std::string& name, const std::string& value, const std::string& where);

// The value as set_option takes it back, exactly. Errors: OptionError.
std::string option_text(const Options& options, const std::string& name);

// Rules between options, which no single row can state. Errors: OptionError.
void validate(const Options& options);

// The aggregation that holds: --loss-agg-mode, or that of the policy loss. Errors: OptionError for one that the policy
// loss does not take.
Aggregation policy_aggregation(const Options& options);

// "0.9,0.999" -> {0.9, 0.999}; nothing -> no numbers. Errors: OptionError.
std::vector<double> parse_numbers(const std::string& option, const std::string& text);

}  // namespace espalier
