// The ranks of a run. Each rank is a process that runs the program with the same arguments; rank 0 prints, and all must
// have the same options.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cli/verbs.h"
#include "espalier/parallel/launch.h"
#include "espalier/parallel/processes.h"

namespace espalier::cli {

class RunRanks {
 public:
  // Reads the launcher's variables. A verb without degrees runs as one process under every launcher. Errors:
  // OptionError where the variables contradict each other.
  void begin(const Verb& verb);
  // Finds the other ranks, once; `timeout`: seconds until a silent one is considered dead. Errors: CommunicationError.
  void meet(double timeout);

  bool several() const { return launch_.ranks > 1; }
  bool talks() const { return launch_.speaks(); }        // prints results, progress and notes
  int local() const { return launch_.local_ranks; }      // ranks on this machine
  int local_rank() const { return launch_.local_rank; }  // among them

  // saved_point, if the launcher has started this run again; else "".
  std::string restart_point(const Verb& verb, const Options& options) const;

  // Folder from which --resume can continue this run of train or grpo: --out (grpo: else --resume), if this run has
  // saved there; else "". Also "" with --overwrite if the launcher gives no run id: the checkpoint may be another
  // run's. Errors: InputError for a damaged file.
  std::string saved_point(const Verb& verb, const Options& options) const;

  // Errors: OptionError where the degrees do not match the number of processes (if there is one process, with the
  // command that starts enough), for --layout auto beside degrees, and for rollouts from standard input on several
  // ranks; UnsupportedError for layouts that the verb does not run under.
  void check(const Verb& verb, const Options& options, const std::vector<std::string>& words) const;

  // With --layout auto: overwrites the degrees with those that rank 0 finds for the number of processes, and gives the
  // reason in a note. Errors: as find_degrees; CommunicationError if rank 0 failed or is silent.
  void choose_layout(const Verb& verb, Options& options, Progress& progress);

  // Connects the ranks. Errors: CommunicationError, also if their options or versions differ.
  const Mesh& connect(const Verb& verb, const Options& options);

  // After an error: whether this rank shows it. The first rank that failed does, because it knows the cause; before the
  // verb is known, rank 0; and every rank that cannot reach the others.
  bool shows_error();
  // "rank 2": the ranks that do not report their failure (Processes::silent_ranks).
  std::string silent_ranks() { return processes_ ? processes_->silent_ranks() : ""; }

 private:
  bool begun_ = false;   // the verb is known
  bool looked_ = false;  // for the other ranks
  Launch launch_;
  std::unique_ptr<Processes> processes_;
};

}  // namespace espalier::cli
