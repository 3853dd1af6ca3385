// Bytes that one rank of a layout sends in a step in every collective, and the seconds for them.
//
// T rows of a set, O of them with edges, R of a layer that continue (all, or the outputs in a narrow last layer), M
// width, k experts a row, E experts, b bytes of an activation, s of a sum. n ranks share the axis; nothing is sent if n
// = 1. A rank of tp sends for every set
//   forward   T M b (embedding), R M b a layer (attention's output), R M b a dense MLP, R M s an MLP of experts
//   head      8 (3 O + edges) for maximum and sums of the logits; with gradients O M b (s where b is narrower)
//   backward  T M b a layer (norm before attention), R M b a dense layer, R (M + k) s a layer of experts
//   recompute R M b a layer
// and once a step its share of the gradients of key/value heads and head norms that several ranks hold. A rank of ep
// sends for a layer of experts with r = k R / tp choices, of which (ep - 1) / ep go to other ranks,
//   forward   8 E (ep - 1) / ep for counts, 2 r M b
//   backward  the same counts, r (2 M b + M s + 2 s)
// The forecast is exact if choices are even. A rank that joins an event without rows (program/joint_order.h) sends the
// counts and returns the results of its experts. A rank of cp sends for a sharded set, with S rows on the rank with the
// most and J key/value heads of size D,
//   forward   2 S J D b a layer; for a wave once more in the backward, and once more where attention is recomputed
//   backward  2 n S J D s a layer
// and of latent attention S (C + K) b and n S (C + K) s a layer, for latents of width C and shared keys of width K,
// with the forward's bytes once more in a trunk's backward unless the path carries latents; and
//   both      16 bytes an edge where derivatives need whole rollouts, 8 L E a rollout where router losses do
// and nothing for a wave that was dealt whole. If the path is sharded over cp (saved/sharded_path.h) and each rank
// keeps c of its P open rows, every rank sends for every event of any of them, joined events included, for a sharded
// layer that is not gathered already,
//   forward   2 c J D b of the rows above; nothing where a pass begins with the layer that the one before it ended with
//   backward  the same, of a trunk with its own rows; and 2 n c J D s of the rows above
// or C + K in place of 2 J D for a path of latents.
// A rank of pp sends T M b to the next stage and back, and once a step the gradient of a tied embedding. Gradients are
// summed once over the ranks that hold the same weights. If weights are sharded over n ranks (shape/units.h), each rank
// sends for a unit of U elements, for every event of the joint order,
//   forward   U / n b: what it keeps; of the head also U s, unless derivatives need whole rollouts
//   backward  U / n b and U s; of the embedding U s alone; of the head both where derivatives need whole rollouts
// Source: the calls in model/, objective/ and gradient/; a test compares what their groups count.
#pragma once

#include <span>

#include "espalier/forecast/cost_model.h"
#include "espalier/program/step_plan.h"
#include "espalier/shape/local_shape.h"
#include "espalier/shape/units.h"

namespace espalier {

struct PlannedTraffic {
  TrafficBytes bytes;
  double seconds = 0;            // in phases and reduction
  double reduction_seconds = 0;  // part of these, after the last backward
};

class Communication {
 public:
  Communication(const LocalShape& local, DType dtype, const StepKind& kind, const MachineProfile& profile);

  // `plans`: of all ranks of dp, this rank included, for the same `rollouts`.
  PlannedTraffic of(std::span<const StepPlan* const> plans, std::span<const Rollout> rollouts) const;
  // The same, assuming that all ranks of dp have this rank's plan.
  PlannedTraffic of(const StepPlan& plan, std::span<const Rollout> rollouts) const;
  // Seconds to gather units and to sum their gradients, for a trunk or a wave of any number of rows. 0 where
  // weights are not sharded.
  double seconds_of_units() const;
  // Seconds of an item below `rows_above` rows of a path sharded over cp; `own_rows`: a trunk's.
  double seconds_of_path(std::int64_t rows_above, std::int64_t own_rows, const PathPlan& path) const;

 private:
  class Walk;

  LocalShape local_;
  Units units_, held_units_;  // of trained and of held parameters; empty unless weights are sharded
  ElementBytes bytes_;
  StepKind kind_;
  MachineProfile profile_;
};

}  // namespace espalier
