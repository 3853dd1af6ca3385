// Held matrices in bfloat16 that are read where the model's files are mapped, without a copy.
//
// The pages belong to the files: processes of a machine that map the same files share them, and the machine may drop
// and read them again. The files must not change while they are mapped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "espalier/checkpoint/model_directory.h"
#include "espalier/shape/local_shape.h"

namespace espalier {

class MappedWeights {
 public:
  // Maps the narrow matrices (TrainedParameters::narrow) of a rank's part of the model whose bytes in the files are
  // those that products read: a whole matrix, or consecutive rows of it, in bfloat16; matrices that one product reads
  // must follow each other in the file. Errors: as load_parameters.
  MappedWeights(const std::filesystem::path& directory, const LocalShape& shape, ValueHead head);

  // In the order of for_each_parameter; null: no matrix fits.
  std::shared_ptr<const std::vector<bool>> parameters() const { return parameters_; }
  // The first of a matrix's numbers.
  const std::byte* values(const std::string& name) const { return values_.at(name); }

  // The first of the model's weight files that has changed since it was mapped, or empty.
  std::filesystem::path changed_file() const;

 private:
  struct State {
    std::filesystem::path path;
    std::uint64_t device, inode;
    std::int64_t bytes, seconds, nanoseconds;  // size, and time of the last change

    bool operator==(const State&) const = default;
  };
  static State state_of(const std::filesystem::path& file);

  StoredTensors stored_;
  std::vector<State> files_;
  std::shared_ptr<const std::vector<bool>> parameters_;
  std::unordered_map<std::string, const std::byte*> values_;
};

}  // namespace espalier
