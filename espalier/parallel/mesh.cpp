#include "espalier/parallel/mesh.h"

#include <algorithm>

#include "espalier/base/error.h"

namespace espalier {
namespace {

// Nothing of it is ever called: Group does by itself what one rank needs.
class GroupOfOne : public Group {
 public:
  GroupOfOne() : Group(0, 1) {}

 private:
  [[noreturn]] static void refuse() { throw InternalError({"", "a group of several ranks", "a group of one", ""}); }
  std::unique_ptr<Pending::Work> do_start_add(const at::Tensor&) override { refuse(); }
  std::unique_ptr<Pending::Work> do_start_gather(const at::Tensor&, const at::Tensor&) override { refuse(); }
  std::unique_ptr<Pending::Work> do_start_scatter_sum(const at::Tensor&, const at::Tensor&) override { refuse(); }
  void do_max(const at::Tensor&) override { refuse(); }
  void do_exchange(const at::Tensor&, std::span<const std::int64_t>, const at::Tensor&,
                   std::span<const std::int64_t>) override {
    refuse();
  }
  void do_broadcast(const at::Tensor&, int) override { refuse(); }
  void do_send(const at::Tensor&, int) override { refuse(); }
  void do_receive(const at::Tensor&, int) override { refuse(); }
};

// The ranks of an axis; axes of the same ranks share `group`, whose own count nobody reads.
class SameRanks : public Group {
 public:
  explicit SameRanks(Group& group) : Group(group.rank(), group.size()), group_(group) {}

 private:
  std::unique_ptr<Pending::Work> do_start_add(const at::Tensor& x) override { return group_.start_add(x).take_work(); }
  std::unique_ptr<Pending::Work> do_start_gather(const at::Tensor& part, const at::Tensor& whole) override {
    return group_.start_gather(part, whole).take_work();
  }
  std::unique_ptr<Pending::Work> do_start_scatter_sum(const at::Tensor& whole, const at::Tensor& part) override {
    return group_.start_scatter_sum(whole, part).take_work();
  }
  void do_max(const at::Tensor& x) override { group_.max_over_ranks(x); }
  void do_exchange(const at::Tensor& send, std::span<const std::int64_t> send_rows, const at::Tensor& receive,
                   std::span<const std::int64_t> receive_rows) override {
    group_.exchange(send, send_rows, receive, receive_rows);
  }
  void do_broadcast(const at::Tensor& x, int root) override { group_.broadcast(x, root); }
  void do_send(const at::Tensor& x, int to) override { group_.send(x, to); }
  void do_receive(const at::Tensor& x, int from) override { group_.receive(x, from); }

  Group& group_;
};

}  // namespace

AxisBytes Mesh::bytes() const {
  return {tp.bytes(), cp.bytes(), pp.bytes(), dp.bytes() + replicas.bytes() + expert_replicas.bytes(), ep.bytes()};
}

void Mesh::record(const std::shared_ptr<TrafficLog>& log) const {
  tp.record(log, "tp"), cp.record(log, "cp"), pp.record(log, "pp"), ep.record(log, "ep");
  for (Group* group : {&dp, &replicas, &expert_replicas}) group->record(log, "dp");
}

Group& OwnedMesh::group_of(Axis axis, int rank, const Degrees& degrees, const MakeGroup& make) {
  GroupKey key = group_along(axis, rank, degrees);
  auto same = std::ranges::find(groups_, key, [](const auto& known) { return known.first; });
  if (same == groups_.end()) {
    std::shared_ptr<Group> group = key.ranks.size() == 1 ? std::make_shared<GroupOfOne>() : make(key);
    same = groups_.emplace(groups_.end(), std::move(key), std::move(group));
  }
  return *axes_.emplace_back(std::make_unique<SameRanks>(*same->second));
}

// The world first: where a rank is missing, that is what everybody finds out.
OwnedMesh::OwnedMesh(int rank, const Degrees& degrees, const MakeGroup& make)
    : groups_(), mesh_([&]() -> Mesh {
        const auto along = [&](Axis axis) -> Group& { return group_of(axis, rank, degrees, make); };
        Group& world = along(Axis::world);
        return {.tp = along(Axis::tp),
                .cp = along(Axis::cp),
                .pp = along(Axis::pp),
                .dp = along(Axis::dp),
                .ep = along(Axis::ep),
                .replicas = along(Axis::replicas),
                .expert_replicas = along(Axis::expert_replicas),
                .world = world,
                .degrees = degrees};
      }()) {}

const Mesh& mesh_of_one() {
  static const OwnedMesh one(0, Degrees{}, {});
  return one.mesh();
}

}  // namespace espalier
