// Information from the launcher of this process: its rank, the number of ranks, and their rendezvous address.
//
//   torchrun  RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_*
//   srun      SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_STEP_TASKS_PER_NODE, SLURM_STEP_NODELIST
//   mpirun    OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE (Open MPI); PMI_RANK, PMI_SIZE, MPI_LOCALRANKID,
//             MPI_LOCALNRANKS (MPICH, Intel)
//
// srun and mpirun only start processes: rank 0 serves the rendezvous at MASTER_ADDR:MASTER_PORT. Defaults: this
// machine, or the first node of srun's list; a port derived from the number of srun's job or of mpirun's process.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace espalier {

struct Launch {
  std::string launcher;  // empty: no launcher
  int rank = 0, ranks = 1;
  int local_rank = 0, local_ranks = 1;  // of those on this machine
  std::string host = "127.0.0.1";
  int port = 29500;
  bool served = false;  // the launcher serves the rendezvous
  int restarts = 0;     // how often the launcher started all processes again
  std::string run;      // the same in all restarts, different in every other run; empty: unknown

  bool speaks() const { return rank == 0; }  // files and the terminal
};

// Null: the variable is not set.
using Environment = std::function<const char*(const char* name)>;

// Errors: OptionError where a variable is no number or contradicts another, or where mpirun runs ranks on several
// machines without MASTER_ADDR.
Launch launch_of(const Environment& environment);
Launch launch_of_environment();

// "torchrun --nproc-per-node 4 --no-python build/espalier train --dp 4": the command that starts `ranks` ranks.
std::string command_with_ranks(std::int64_t ranks, const std::string& program, const std::vector<std::string>& words);

}  // namespace espalier
