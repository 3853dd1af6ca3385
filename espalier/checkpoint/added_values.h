// A model's additions (shape/additions.h) in files: a directory of their own, in the form of peft. Parameters of the
// model that train beside them stand there, too.
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "espalier/base/dtype.h"
#include "espalier/model/parameters.h"

namespace espalier {

class AddedValues {
 public:
  virtual ~AddedValues() = default;

  // True if the files have the values of an added row, or of one of the model's own parameters; and these values, in
  // the shape of the row. Errors: InputError for values that are not finite.
  virtual bool has(const std::string& parameter) const = 0;
  virtual std::vector<std::byte> values(const std::string& parameter, DType dtype) const = 0;
};

// `base`: the shape of the model without additions. Errors: InputError for missing or damaged files and for another
// model's; UnsupportedError for what computes another formula.
std::unique_ptr<const AddedValues> open_added_values(const std::filesystem::path& directory, const ModelShape& base);

// Fills the directory `target`, created when absent, with the table's parameters. `base`: the model's directory, which
// the files name. Errors: OptionError for a failing output.
void write_added_values(const std::filesystem::path& target, const ModelShape& shape, const std::string& base,
                        const ParameterTable& table, DType from, const ParameterValues& values, DType to);

// The prefix of the names of tensors in such files; "" for a model without additions.
std::string prefix_of_files(const ModelShape& shape);

// A note for the user about who else reads the written files; "": none.
std::string note_on_files(const ModelShape& shape);

}  // namespace espalier
