// Names of checkpoints: tinker://RUN/KIND/NAME, exactly three parts, of which none can leave its folder.
#pragma once

#include <string>
#include <string_view>

namespace espalier::serve {

inline constexpr const char* kDescription = "checkpoint.json";  // of a checkpoint, in its folder

// The contents of a checkpoint: weights and optimizer; weights to sample from; weights for other programs.
enum class CheckpointKind { training, sampler, external };

struct CheckpointName {
  std::string run;
  CheckpointKind kind = CheckpointKind::training;
  std::string name;

  std::string path() const;  // tinker://...
  std::string id() const;    // "weights/NAME"
  bool operator<(const CheckpointName& other) const { return path() < other.path(); }
};

const char* folder_of(CheckpointKind kind);     // "weights", "sampler_weights", "external_weights"
const char* type_name_of(CheckpointKind kind);  // "training", "sampler", "external"

// Errors: InputError for another form.
CheckpointName checkpoint_name(const std::string& path);
CheckpointName checkpoint_name(const std::string& run, const std::string& folder, const std::string& name);
// Letters, digits, '.', '_', '-', at most 128 of them, and no name that means another folder. Errors: InputError.
void require_plain_name(const std::string& name, const char* where);

}  // namespace espalier::serve
