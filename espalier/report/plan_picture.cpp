#include "espalier/report/plan_picture.h"

#include <algorithm>
#include <set>

#include "espalier/base/error.h"
#include "espalier/base/json.h"
#include "espalier/grouping/prefix_tree.h"
#include "espalier/program/running_order.h"

namespace espalier {
namespace {

constexpr std::size_t kMostNodes = 200, kMostEntries = 300;

// Tokens of the node that are prompt in every rollout below it.
std::int32_t prompt_tokens(const PrefixTree& tree, const PrefixNode& node, std::span<const Rollout> rollouts) {
  std::int32_t end = node.end;
  for (std::int32_t leaf = node.leaf_begin; leaf < node.leaf_end; ++leaf)
    end = std::min(end, rollouts[tree.leaf_order[leaf]].prompt_length());
  return std::max(end - node.begin, 0);
}

// Parents stand before children, so a tree's first nodes are again a tree.
void add_tree(const PrefixTree& tree, std::span<const Rollout> rollouts, Json& trees, Json& nodes) {
  const std::size_t first = nodes.size(), shown = std::min(tree.nodes.size(), kMostNodes - first);
  if (shown == 0) return;
  trees.push_back({{"first_node", first},
                   {"nodes", shown},
                   {"node_count", tree.nodes.size()},
                   {"rollouts", tree.leaf_order.size()},
                   {"logical", tree.logical_tokens()},
                   {"physical", tree.physical_tokens()}});
  for (std::size_t i = 0; i < shown; ++i) {
    const PrefixNode& node = tree.nodes[i];
    nodes.push_back({{"parent", node.parent < 0 ? -1 : node.parent + static_cast<std::int64_t>(first)},
                     {"begin", node.begin},
                     {"tokens", node.length()},
                     {"prompt_tokens", prompt_tokens(tree, node, rollouts)},
                     {"rollouts", node.multiplicity()}});
  }
}

std::int64_t count_entries(const std::vector<PlanItem>& items) {
  std::int64_t count = 0;
  for (const PlanItem& item : items) count += item.kind == ItemKind::wave ? 1 : 2 + count_entries(item.below);
  return count;
}

Json entry_json(const RunEntry& entry, const std::vector<std::int32_t>& tree_of) {
  std::set<std::int32_t> trees;
  for (const std::int32_t rollout : entry.item->set.rollouts) trees.insert(tree_of[rollout]);
  return {{"phase", std::string(1, entry.phase)},
          {"level", entry.level},
          {"rows", entry.item->set.rows},
          {"path_rows", entry.item->path_rows},
          {"rollouts", entry.item->set.rollouts.size()},
          {"tree", trees.empty() ? -1 : *trees.begin()},
          {"trees", trees.size()},
          {"seconds", entry.seconds}};
}

// Numbers of one object; a wrong one is an InputError that names it.
struct Fields {
  const Json& json;
  const std::string& where;

  [[noreturn]] void refuse(const std::string& name, const std::string& expected) const {
    throw InputError({where, text_of("\"", name, "\" of a picture: ", expected),
                      json.is_object() && json.contains(name) ? json[name].dump().substr(0, 80) : "nothing",
                      "remove the line; the report then has no picture of it"});
  }
  std::int64_t integer(const char* name, std::int64_t least = 0) const {
    if (!json.is_object() || !json.contains(name) || !json[name].is_number_integer()) refuse(name, "an integer");
    const auto value = json[name].get<std::int64_t>();
    if (value < least || value > (std::int64_t{1} << 50)) refuse(name, text_of("at least ", least, " and below 2^50"));
    return value;
  }
  double seconds() const {
    if (!json.is_object() || !json.contains("seconds") || !json["seconds"].is_number()) refuse("seconds", "a number");
    const auto value = json["seconds"].get<double>();
    if (!(value >= 0 && value <= 0x1p50)) refuse("seconds", "at least 0 and below 2^50");
    return value;
  }
  // The limit also keeps sums over the array finite: of seconds, and of rows in 64 bits.
  const Json& array(const char* name, std::size_t most) const {
    if (!json.is_object() || !json.contains(name) || !json[name].is_array() || json[name].size() > most)
      refuse(name, text_of("an array of at most ", most));
    return json[name];
  }
};

PictureNode read_node(const Fields& node) {
  return {node.integer("parent", -1), node.integer("begin"), node.integer("tokens"), node.integer("prompt_tokens"),
          node.integer("rollouts")};
}

PictureTree read_tree(const Fields& tree) {
  return {tree.integer("first_node"), tree.integer("nodes"),   tree.integer("node_count"),
          tree.integer("rollouts"),   tree.integer("logical"), tree.integer("physical")};
}

PictureEntry read_entry(const Fields& entry) {
  PictureEntry out{"",
                   entry.integer("level"),
                   entry.integer("rows"),
                   entry.integer("path_rows"),
                   entry.integer("rollouts"),
                   entry.integer("tree", -1),
                   entry.integer("trees"),
                   entry.seconds()};
  for (const char* phase : {"A", "B", "C"})
    if (entry.json.value("phase", Json()) == phase) out.phase = phase;
  if (out.phase.empty()) entry.refuse("phase", "A, B or C");
  if (out.level > 1000) entry.refuse("level", "at most 1000");
  return out;
}

// A parent stands before its children, in the same tree: drawing may walk from the first to the last.
void check_trees(const PlanPicture& picture, const Fields& fields) {
  std::int64_t next = 0;
  for (const PictureTree& tree : picture.trees) {
    if (tree.first_node != next || tree.nodes < 1) fields.refuse("trees", "nodes that follow one another");
    next += tree.nodes;
    if (next > static_cast<std::int64_t>(picture.nodes.size()))
      fields.refuse("nodes", "an entry for every node that the trees name");
    for (std::int64_t i = tree.first_node; i < next; ++i) {
      const std::int64_t parent = picture.nodes[i].parent;
      if (i == tree.first_node ? parent != -1 : parent < tree.first_node || parent >= i)
        fields.refuse("nodes", "parents before children");
    }
  }
}

}  // namespace

Json plan_picture(const StepPlan& plan, std::span<const Rollout> rollouts) {
  Json trees = Json::array(), nodes = Json::array(), schedule = Json::array();
  const std::vector<PrefixTree> forest = build_prefix_trees(rollouts, ShareMode::whole_trees);
  std::vector<std::int32_t> tree_of(rollouts.size());
  for (std::size_t t = 0; t < forest.size(); ++t) {
    for (const std::int32_t rollout : forest[t].leaf_order) tree_of[rollout] = static_cast<std::int32_t>(t);
    add_tree(forest[t], rollouts, trees, nodes);
  }
  for (const RunEntry& entry : running_order(plan.items, kMostEntries)) schedule.push_back(entry_json(entry, tree_of));
  return {{"trees", std::move(trees)},
          {"tree_count", forest.size()},
          {"nodes", std::move(nodes)},
          {"schedule", std::move(schedule)},
          {"entry_count", count_entries(plan.items)},
          {"rows",
           {{"logical", plan.logical_rows},
            {"physical", plan.physical_rows()},
            {"trunk", plan.trunk_rows},
            {"wave", plan.wave_rows}}},
          {"seconds", plan.chosen.seconds}};
}

PlanPicture read_picture(const Json& json, const std::string& where) {
  const Fields fields{json, where};
  PlanPicture picture;
  for (const Json& tree : fields.array("trees", kMostNodes)) picture.trees.push_back(read_tree({tree, where}));
  for (const Json& node : fields.array("nodes", kMostNodes)) picture.nodes.push_back(read_node({node, where}));
  for (const Json& entry : fields.array("schedule", kMostEntries))
    picture.schedule.push_back(read_entry({entry, where}));
  picture.tree_count = fields.integer("tree_count");
  picture.entry_count = fields.integer("entry_count");
  if (!json.contains("rows")) fields.refuse("rows", "an object");
  const Fields rows{json["rows"], where};
  picture.logical = rows.integer("logical"), picture.physical = rows.integer("physical");
  picture.trunk = rows.integer("trunk"), picture.wave = rows.integer("wave");
  picture.seconds = fields.seconds();
  check_trees(picture, fields);
  return picture;
}

}  // namespace espalier
