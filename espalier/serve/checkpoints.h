// The checkpoints of a server, in its folder: STATE/runs/RUN/KIND/NAME, each with a description beside its tensors.
//
// A folder is made whole or not at all (base/atomic_file.h), so what is found at the start is complete.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "espalier/base/json.h"
#include "espalier/serve/calls.h"
#include "espalier/serve/fields.h"
#include "espalier/serve/names.h"

namespace espalier::serve {

struct Checkpoint {
  CheckpointName name;
  std::string base;
  TunedPart part;
  std::int64_t bytes = 0;
  double created = 0;             // seconds since 1970
  std::optional<double> expires;  // it is removed then
  Json user_metadata;

  std::string description() const;  // JSON text
  // Errors: InputError unless it has this part, whatever the seed, of this base model.
  void require(const std::string& of_base, TunedPart of_part) const;
};

class Checkpoints {
 public:
  // Finds the checkpoints of a former server. Folders without a readable description are left alone.
  explicit Checkpoints(std::filesystem::path state);

  std::filesystem::path folder(const CheckpointName& name) const;
  const Checkpoint* find(const CheckpointName& name) const;
  // Its files that are for others: without the description.
  std::vector<std::filesystem::path> files(const CheckpointName& name) const;
  // One whose folder has been written.
  void add(Checkpoint checkpoint);
  bool remove(const CheckpointName& name);  // with its folder; false: there is none
  bool set_expiry(const CheckpointName& name, std::optional<double> expires);
  void remove_expired(double now);
  const std::vector<Checkpoint>& all() const { return all_; }  // the oldest first

 private:
  std::filesystem::path state_;
  std::vector<Checkpoint> all_;
};

// The trained part as a member of this server's records.
void write_part(Json& record, const TunedPart& part);
bool has_part(const Fields& record);
TunedPart read_part(const Fields& record);

// Members of the service's answers that tell clients about the trained part; `whole`: all of it.
void tell_part(Json& answer, const TunedPart& part, bool whole = false);

}  // namespace espalier::serve
