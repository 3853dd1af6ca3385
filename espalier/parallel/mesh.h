// The ranks of a run seen from one of them: a group for each axis (espalier/parallel/degrees.h).
#pragma once

#include <array>
#include <compare>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "espalier/parallel/degrees.h"
#include "espalier/parallel/group.h"

namespace espalier {

struct Mesh {
  Group& tp;
  Group& cp;
  Group& pp;
  Group& dp;
  Group& ep;
  Group& replicas;         // dp x cp: gradients of weights that are not experts' are summed over them
  Group& expert_replicas;  // gradients of experts are summed over them
  Group& world;
  Degrees degrees;
  int local_ranks = 1;   // of this run on this machine: they share its memory
  std::string run = {};  // the same in all restarts of a run and in no other one; empty: not known

  Place place() const { return place_of(world.rank(), degrees); }
  bool writes() const { return world.rank() == 0; }  // files and the terminal
  AxisBytes bytes() const;                           // that this rank gave to the axes so far
  // Logs the collectives of these groups from now on, except the world's; null: stops logging.
  void record(const std::shared_ptr<TrafficLog>& log) const;
};

// One process: every group has one rank.
const Mesh& mesh_of_one();

// A mesh and the groups it refers to. Axes of the same ranks and kind share a connection and count their bytes apart.
class OwnedMesh {
 public:
  // Makes a group of at least two ranks, this one among them. Every rank makes the groups of the axes in the same
  // order, so that making one may wait for its other ranks.
  using MakeGroup = std::function<std::shared_ptr<Group>(const GroupKey& key)>;

  OwnedMesh(int rank, const Degrees& degrees, const MakeGroup& make);
  const Mesh& mesh() const { return mesh_; }
  Mesh& mesh() { return mesh_; }

 private:
  Group& group_of(Axis axis, int rank, const Degrees& degrees, const MakeGroup& make);

  std::vector<std::pair<GroupKey, std::shared_ptr<Group>>> groups_;
  std::vector<std::unique_ptr<Group>> axes_;  // each counts the bytes of its own
  Mesh mesh_;
};

}  // namespace espalier
