#include "espalier/parallel/launch.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <optional>
#include <string_view>

#include "espalier/base/error.h"

namespace espalier {
namespace {

class Variables {
 public:
  explicit Variables(const Environment& environment) : environment_(environment) {}

  std::optional<std::string> text(const char* name) const {
    const char* value = environment_(name);
    return value == nullptr || *value == '\0' ? std::nullopt : std::optional<std::string>(value);
  }

  bool has(const char* name) const { return text(name).has_value(); }

  int number(const char* name, int otherwise) const {
    const auto value = text(name);
    if (!value) return otherwise;
    int out = 0;
    const auto [end, failure] = std::from_chars(value->data(), value->data() + value->size(), out);
    if (failure != std::errc() || end == value->data()) throw OptionError({name, "a number", '"' + *value + '"', ""});
    return out;
  }

 private:
  const Environment& environment_;
};

// "node[03-05,9],other" -> "node03": the first name of a list of nodes.
std::string first_node(std::string_view list) {
  const std::size_t end = list.find_first_of("[,");
  std::string name(list.substr(0, end));
  if (end != std::string_view::npos && list[end] == '[')
    name += list.substr(end + 1, list.find_first_of("-,]", end + 1) - end - 1);
  return name;
}

// A port that other jobs on the same machine do not get.
int port_of(const Variables& variables, int job) { return variables.number("MASTER_PORT", 20000 + job % 20000); }

Launch of_torchrun(const Variables& variables) {
  Launch launch;
  launch.launcher = "torchrun";
  launch.rank = variables.number("RANK", 0);
  launch.ranks = variables.number("WORLD_SIZE", 1);
  launch.local_ranks = variables.number("LOCAL_WORLD_SIZE", launch.ranks);
  launch.local_rank = variables.number("LOCAL_RANK", launch.rank % std::max(1, launch.local_ranks));
  launch.host = variables.text("MASTER_ADDR").value_or("127.0.0.1");
  launch.port = variables.number("MASTER_PORT", 29500);
  launch.served = variables.text("TORCHELASTIC_USE_AGENT_STORE") == "True";
  launch.restarts = variables.number("TORCHELASTIC_RESTART_COUNT", 0);
  // Run ids are often all the same ("none"); the agent that starts the processes again stays one process.
  launch.run = text_of(variables.text("TORCHELASTIC_RUN_ID").value_or(""), ':', getppid());
  return launch;
}

Launch of_srun(const Variables& variables) {
  Launch launch;
  launch.launcher = "srun";
  launch.rank = variables.number("SLURM_PROCID", 0);
  launch.ranks = variables.number("SLURM_STEP_NUM_TASKS", 1);
  launch.local_ranks = variables.number("SLURM_STEP_TASKS_PER_NODE", launch.ranks);  // "4(x2)": 4
  launch.local_rank = variables.number("SLURM_LOCALID", 0);
  launch.host =
      variables.text("MASTER_ADDR").value_or(first_node(variables.text("SLURM_STEP_NODELIST").value_or("127.0.0.1")));
  launch.port = port_of(variables, variables.number("SLURM_JOB_ID", 0));
  return launch;
}

Launch of_mpirun(const Variables& variables, const char* rank, const char* ranks, const char* local_rank,
                 const char* local_ranks) {
  Launch launch;
  launch.launcher = "mpirun";
  launch.rank = variables.number(rank, 0);
  launch.ranks = variables.number(ranks, 1);
  launch.local_ranks = variables.number(local_ranks, launch.ranks);
  launch.local_rank = variables.number(local_rank, launch.rank % std::max(1, launch.local_ranks));
  launch.port = port_of(variables, getppid());  // of one mpirun on this machine; several machines give MASTER_PORT
  if (const auto host = variables.text("MASTER_ADDR"))
    launch.host = *host;
  else if (launch.local_ranks < launch.ranks)
    throw OptionError({"MASTER_ADDR", "the address of rank 0's machine, because ranks run on several machines",
                       "nothing", "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 ..."});
  return launch;
}

}  // namespace

Launch launch_of(const Environment& environment) {
  const Variables variables(environment);
  Launch launch;
  if (variables.has("RANK") && variables.has("WORLD_SIZE"))
    launch = of_torchrun(variables);
  else if (variables.has("OMPI_COMM_WORLD_SIZE"))
    launch = of_mpirun(variables, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                       "OMPI_COMM_WORLD_LOCAL_SIZE");
  else if (variables.has("PMI_SIZE") && !variables.has("SLURM_STEP_NUM_TASKS"))
    launch = of_mpirun(variables, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS");
  else if (variables.has("SLURM_STEP_NUM_TASKS") && variables.has("SLURM_PROCID"))
    launch = of_srun(variables);
  if (launch.ranks < 1 || launch.rank < 0 || launch.rank >= launch.ranks)
    throw OptionError({launch.launcher + "'s variables", "a rank of at least 0 and below the number of ranks",
                       text_of("rank ", launch.rank, " of ", launch.ranks), ""});
  return launch;
}

Launch launch_of_environment() {
  return launch_of([](const char* name) { return std::getenv(name); });
}

std::string command_with_ranks(std::int64_t ranks, const std::string& program, const std::vector<std::string>& words) {
  std::string out = text_of("torchrun --nproc-per-node ", ranks, " --no-python ", program);
  for (const std::string& word : words) {
    const bool plain = !word.empty() && word.find_first_not_of(
                                            "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                            "0123456789-_=./,:+@%") == std::string::npos;
    out += ' ';
    if (plain) {
      out += word;
      continue;
    }
    out += '\'';
    for (const char c : word) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
    out += '\'';
  }
  return out;
}

}  // namespace espalier
