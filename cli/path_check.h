// Checks that inputs of a run survive it and that outputs are writable: decided before anything is read or computed.
#pragma once

#include <string>
#include <vector>

#include "cli/verbs.h"
#include "espalier/options/options.h"

namespace espalier::cli {

// For every option and argument that names an output (the `unit` column of the option table, OUT of the usage line):
//
//   no input is the same file or folder, by device and inode, so links of both kinds count; `-` is what stdin reads
//   no input lies in a folder that is replaced, and no folder that is replaced lies in one that is read
//   no file of a folder that is read is replaced
//   no other output is the same, or lies in a folder that is replaced
//   a file of records that exists is replaced only with --overwrite
//   its folder exists and can be written
//
// A run continued in place may have the same folder as --resume and --out. Errors: OptionError; nothing was touched.
void check_paths(const Verb& verb, const Options& options, const std::vector<std::string>& arguments,
                 const std::string& config);

// True if the verb writes anything but standard output.
bool has_output(const Verb& verb, const Options& options, const std::vector<std::string>& arguments);

}  // namespace espalier::cli
