#include "espalier/execute/agreed_program.h"

#include <string>
#include <utility>
#include <vector>

namespace espalier {

Program agreed_program(const Mesh& mesh, const StepPlan& plan, bool gradients) {
  const Place place = mesh.place();
  bool path_sharded = plan.path.sharded;
  if (mesh.cp.size() > 1) path_sharded = maxima_over_ranks(mesh.dp, {path_sharded ? 1.0 : 0.0}).front() > 0;
  const RankRange together = joint_ranks(mesh.degrees, place, path_sharded);
  const std::int64_t cp = mesh.cp.size(), end = together.begin + together.count;
  std::vector<std::string> all;
  if (cp % together.count == 0) {  // all have this plan
    for (std::int64_t rank = together.begin; rank < end; ++rank) all.push_back(events_of(plan.items, rank % cp));
  } else {
    const std::string own = events_of(plan.items, mesh.cp.rank());
    for (int rank = 0; rank < mesh.replicas.size(); ++rank) {
      std::string events = text_of_rank(mesh.replicas, own, rank);
      if (rank >= together.begin && rank < end) all.push_back(std::move(events));
    }
  }
  const auto member = static_cast<std::size_t>(mesh.replicas.rank() - together.begin);
  return program_of(plan.items, joint_order(std::move(all), cp, together.begin),
                    {member, mesh.cp.rank(), cp, waves_in_flight(mesh.degrees, place, gradients), plan.path.sharded});
}

}  // namespace espalier
