// A run of several processes, each of which runs the program with the same words: who talks, and what all must agree
// on.
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
  // A verb without degrees runs as one process under every launcher.
  void begin(const Verb& verb);
  // Finds the other ranks; `timeout`: seconds until a silent one is considered dead. Errors: CommunicationError.
  void meet(double timeout);

  bool several() const { return launch_.ranks > 1; }
  bool talks() const { return launch_.speaks(); }        // prints results, progress and notes
  int local() const { return launch_.local_ranks; }      // ranks on this machine
  int local_rank() const { return launch_.local_rank; }  // among them

  // Folder that a restarted run continues from: --out, where this very run has saved; else "".
  std::string restart_point(const Verb& verb, const Options& options) const;

  // Where this very run of train or grpo has saved what --resume continues; "": nowhere. Errors: those of a damaged
  // file.
  std::string saved_point(const Verb& verb, const Options& options) const;

  // Errors: OptionError where the degrees are not those of the processes, with the command that starts as many;
  // UnsupportedError for layouts that the verb does not run under.
  void check(const Verb& verb, const Options& options, const std::vector<std::string>& words) const;

  // With --layout auto: overwrites the degrees with those that rank 0 finds for the processes there are; a note says
  // why. Errors: OptionError for degrees that were given, too.
  void choose_layout(const Verb& verb, Options& options, Progress& progress);

  // Connects the ranks. Errors: CommunicationError, also where they were told different things.
  const Mesh& connect(const Verb& verb, const Options& options);

  // After an error: whether this rank shows it. Among several the first one that failed does, for it knows why; where
  // the words themselves were wrong, rank 0.
  bool shows_error();
  std::string silent_ranks() { return processes_ ? processes_->silent_ranks() : ""; }

 private:
  bool begun_ = false;   // which verb it is, is known
  bool looked_ = false;  // for the other ranks
  Launch launch_;
  std::unique_ptr<Processes> processes_;
};

}  // namespace espalier::cli
