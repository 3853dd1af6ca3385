// Writes rollouts as neutral JSON Lines, one record at a time; gzip where the name ends in ".gz",
// zstd where it ends in ".zst".
//
// The file is complete after finish() and as it was before otherwise (base/atomic_file.h). Numbers are the shortest
// decimals that read back as the same bits; a record read, written and read again is the same record.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "espalier/rollout/rollout.h"

namespace espalier {

// A series to add to a record, or to write in place of the one it has: "logprobs", "entropies", "old_logprobs" ...
struct ExtraSeries {
  std::string_view field;
  std::span<const double> values;  // one per response token
};

// One record as JSON, without a newline. Errors: InternalError for values that are not finite, which JSON cannot hold;
// UnsupportedError for an answer of a pair or list.
std::string rollout_json(const Rollout& rollout, const std::vector<ExtraSeries>& extras = {});

// One record of several answers, a pair or a list, as JSON.
std::string set_json(std::span<const Rollout> answers);

struct RolloutSink;  // where the text goes, packed or not

class RolloutWriter {
 public:
  explicit RolloutWriter(const std::string& path);  // OptionError where the file cannot be created
  RolloutWriter(const RolloutWriter&) = delete;
  RolloutWriter& operator=(const RolloutWriter&) = delete;
  ~RolloutWriter();  // without finish(): nothing is left behind

  void write(const Rollout& rollout, const std::vector<ExtraSeries>& extras = {});
  // One record of several answers: a pair (chosen_ids, rejected_ids), or a list (answers); of one rollout, write.
  void write_record(std::span<const Rollout> rollouts);
  void finish();

 private:
  std::unique_ptr<RolloutSink> sink_;
};

}  // namespace espalier
