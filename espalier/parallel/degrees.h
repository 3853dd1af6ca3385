// The number of ranks along each axis of a run, and which ranks share an axis. Uses no tensors, so that the planner can
// include it.
//
// Ranks are counted with tp fastest, then cp, pp, dp: rank = ((dp_ * PP + pp_) * CP + cp_) * TP + tp_. Experts are
// spread over neighbours among the dp x cp x tp ranks of one pipeline stage, tp fastest.
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <vector>

#include "espalier/options/options.h"

namespace espalier {

struct Degrees {
  std::int64_t tp = 1, cp = 1, pp = 1, dp = 1, ep = 1;
  bool full = false;  // --shard full: weights are sharded over the ranks that would hold copies (shape/units.h)

  std::int64_t ranks() const { return tp * cp * pp * dp; }  // ep reuses the ranks of dp, cp and tp
  bool operator==(const Degrees&) const = default;
};
Degrees degrees_of(const Options& options);
std::string text_of_degrees(const Degrees& degrees);  // "tp 2, dp 4, shard full": those above 1; "one rank"

// The position of one rank on every axis, from 0.
struct Place {
  std::int64_t tp = 0, cp = 0, pp = 0, dp = 0, ep = 0;
};
Place place_of(std::int64_t rank, const Degrees& degrees);

// The most waves of a stage of pp that wait for their backward at once (program/program.h).
std::int64_t waves_in_flight(const Degrees& degrees, const Place& place, bool gradients);

enum class Axis {
  tp,
  cp,
  pp,
  dp,
  ep,
  replicas,         // dp x cp: the same parts of the weights that are not experts'
  expert_replicas,  // the same experts of the same stage
  world
};

// The ranks that share an axis with `rank`, itself included, ascending.
std::vector<int> ranks_along(Axis axis, std::int64_t rank, const Degrees& degrees);

// Weights and their gradients have a separate connection, because they are sent while rows are computed, and the order
// of the rows' collectives differs between ranks.
enum class Connection { rows, weights };

// Axes of the same ranks and connection share a group.
struct GroupKey {
  std::vector<int> ranks;  // of the world, ascending
  Connection connection = Connection::rows;
  auto operator<=>(const GroupKey&) const = default;
};
GroupKey group_along(Axis axis, std::int64_t rank, const Degrees& degrees);

// Bytes that a rank sends in collectives, by axis; dp includes the sums of gradients over replicas.
struct AxisBytes {
  std::int64_t tp = 0, cp = 0, pp = 0, dp = 0, ep = 0;

  AxisBytes& operator+=(const AxisBytes& other);
  AxisBytes operator-(const AxisBytes& other) const;
  bool operator==(const AxisBytes&) const = default;
  std::int64_t total() const { return tp + cp + pp + dp + ep; }
};

// The bytes of a step, by phase: trunk forwards, waves, trunk backwards, and the sums of gradients after them. The
// exchange of plans, losses and log-probs is not included.
struct TrafficBytes {
  AxisBytes a, b, c, reduction;

  bool operator==(const TrafficBytes&) const = default;
  TrafficBytes& operator+=(const TrafficBytes& other);
};

// Errors: OptionError where ep does not divide the ranks of a stage, dp x cp x tp.
void check_degrees(const Degrees& degrees);

}  // namespace espalier
