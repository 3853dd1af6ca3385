#include "espalier/parallel/degrees.h"

#include "espalier/base/error.h"

namespace espalier {

Degrees degrees_of(const Options& options) {
  return {.tp = options.tp,
          .cp = options.cp,
          .pp = options.pp,
          .dp = options.dp,
          .ep = options.ep,
          .full = options.shard == Sharding::full && options.dp * options.cp > 1};
}

std::string text_of_degrees(const Degrees& degrees) {
  std::string out;
  for (const auto& [name, degree] :
       {std::pair{"tp", degrees.tp}, {"cp", degrees.cp}, {"pp", degrees.pp}, {"dp", degrees.dp}, {"ep", degrees.ep}})
    if (degree > 1) out += text_of(out.empty() ? "" : ", ", name, " ", degree);
  if (degrees.full) out += ", shard full";
  return out.empty() ? "one rank" : out;
}

Place place_of(std::int64_t rank, const Degrees& d) {
  Place place;
  place.tp = rank % d.tp;
  place.cp = rank / d.tp % d.cp;
  place.pp = rank / (d.tp * d.cp) % d.pp;
  place.dp = rank / (d.tp * d.cp * d.pp);
  place.ep = ((place.dp * d.cp + place.cp) * d.tp + place.tp) % d.ep;
  return place;
}

std::int64_t waves_in_flight(const Degrees& degrees, const Place& place, bool gradients) {
  return gradients ? degrees.pp - place.pp : 1;
}

namespace {

bool same_block(const Place& a, const Place& b, const Degrees& d) {
  const auto block = [&](const Place& p) { return ((p.dp * d.cp + p.cp) * d.tp + p.tp) / d.ep; };
  return a.pp == b.pp && block(a) == block(b);
}

bool share(Axis axis, const Place& a, const Place& b, const Degrees& d) {
  switch (axis) {
    case Axis::tp:
      return a.cp == b.cp && a.pp == b.pp && a.dp == b.dp;
    case Axis::cp:
      return a.tp == b.tp && a.pp == b.pp && a.dp == b.dp;
    case Axis::pp:
      return a.tp == b.tp && a.cp == b.cp && a.dp == b.dp;
    case Axis::dp:
      return a.tp == b.tp && a.cp == b.cp && a.pp == b.pp;
    case Axis::ep:
      return same_block(a, b, d);
    case Axis::replicas:
      return a.tp == b.tp && a.pp == b.pp;
    case Axis::expert_replicas:
      return a.pp == b.pp && a.ep == b.ep;
    case Axis::world:
      return true;
  }
  return false;
}

}  // namespace

std::vector<int> ranks_along(Axis axis, std::int64_t rank, const Degrees& degrees) {
  const Place own = place_of(rank, degrees);
  std::vector<int> ranks;
  for (std::int64_t other = 0; other < degrees.ranks(); ++other)
    if (share(axis, own, place_of(other, degrees), degrees)) ranks.push_back(static_cast<int>(other));
  return ranks;
}

AxisBytes& AxisBytes::operator+=(const AxisBytes& other) {
  tp += other.tp, cp += other.cp, pp += other.pp, dp += other.dp, ep += other.ep;
  return *this;
}

AxisBytes AxisBytes::operator-(const AxisBytes& other) const {
  return {tp - other.tp, cp - other.cp, pp - other.pp, dp - other.dp, ep - other.ep};
}

TrafficBytes& TrafficBytes::operator+=(const TrafficBytes& other) {
  a += other.a, b += other.b, c += other.c, reduction += other.reduction;
  return *this;
}

void check_degrees(const Degrees& degrees) {
  const std::int64_t stage = degrees.dp * degrees.cp * degrees.tp;
  if (stage % degrees.ep != 0)
    throw OptionError({"--ep", text_of("a divisor of the ", stage, " ranks of dp x cp x tp"), text_of(degrees.ep), ""});
}

GroupKey group_along(Axis axis, std::int64_t rank, const Degrees& degrees) {
  const bool weights = axis == Axis::replicas || axis == Axis::expert_replicas;
  return {ranks_along(axis, rank, degrees), weights ? Connection::weights : Connection::rows};
}

}  // namespace espalier
