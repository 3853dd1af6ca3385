#include "espalier/report/drawing.h"

#include <algorithm>
#include <span>

#include "espalier/base/error.h"
#include "espalier/report/html.h"

namespace espalier {
namespace {

constexpr std::size_t kEnlarged = 12;

std::string counted(std::int64_t count, const char* one, const char* many) {
  return shown(static_cast<double>(count), Unit::count) + (count == 1 ? one : many);
}

// A box whose x and width are shares of the drawing in percent.
std::string box(double x, double y, double width, double height, const std::string& classes, const std::string& title) {
  return "<rect class=\"" + classes + "\" x=\"" + coordinate(x) + "%\" y=\"" + coordinate(y) + "\" width=\"" +
         coordinate(width) + "%\" height=\"" + coordinate(height) + "\"><title>" + escaped(title) + "</title></rect>";
}

std::string node_boxes(const PictureNode& node, double y, double height, double percent_per_token) {
  const auto part = [&](std::int64_t from, std::int64_t tokens, const std::string& classes, const char* what) {
    if (tokens <= 0) return std::string();
    return box(static_cast<double>(from) * percent_per_token, y, static_cast<double>(tokens) * percent_per_token,
               height, classes,
               text_of(counted(tokens, " token of ", " tokens of "), what, ", depths ", from, " to ", from + tokens - 1,
                       ", in ", counted(node.rollouts, " rollout", " rollouts")));
  };
  const std::int64_t prompt = std::min(node.prompt_tokens, node.tokens);
  return part(node.begin, prompt, "fill prompt", "prompt") +
         part(node.begin + prompt, node.tokens - prompt, node.rollouts > 1 ? "fill shared" : "fill response",
              node.rollouts > 1 ? "responses that begin alike" : "a response");
}

std::string tree_figure(const PlanPicture& picture, std::size_t index, std::int64_t deepest) {
  const PictureTree& tree = picture.trees[index];
  const double unit = std::clamp(110.0 / static_cast<double>(std::max<std::int64_t>(tree.rollouts, 1)), 0.25, 11.0);
  const double percent = 100.0 / static_cast<double>(std::max<std::int64_t>(deepest, 1));
  std::vector<double> free(tree.nodes);  // where the next child of a node stands
  std::string boxes;
  for (std::int64_t i = 0; i < tree.nodes; ++i) {
    const PictureNode& node = picture.nodes[tree.first_node + i];
    double& place = free[node.parent < 0 ? i : node.parent - tree.first_node];
    const double y = place, height = static_cast<double>(node.rollouts) * unit;
    place += height;
    free[i] = y;
    boxes += node_boxes(node, y, std::max(height - std::min(1.0, unit / 4), 0.2), percent);
  }
  const double height = static_cast<double>(tree.rollouts) * unit;
  std::string caption =
      text_of("<strong>Tree ", index + 1, "</strong> ", counted(tree.rollouts, " rollout", " rollouts"),
              "<br><span class=\"note\">", counted(tree.physical, " token", " tokens"), " once, instead of ",
              counted(tree.logical, "", ""));
  if (tree.nodes < tree.node_count)
    caption += text_of("; ", counted(tree.node_count - tree.nodes, " node is", " nodes are"), " not drawn");
  return text_of("<figure class=\"tree\"><figcaption>", caption, "</span></figcaption><svg width=\"100%\" height=\"",
                 coordinate(std::max(height, 4.0)), "\" role=\"img\"><title>Prefix tree ", index + 1, "</title><desc>",
                 tree.node_count, " nodes, ", tree.rollouts, " rollouts</desc>", boxes, "</svg></figure>\n");
}

const char* meaning_of(const PictureEntry& entry) {
  return entry.phase == "A" ? "trunk forward" : entry.phase == "B" ? "wave" : "trunk backward";
}

std::string timeline(std::span<const PictureEntry> entries, const std::string& what) {
  constexpr double kRow = 30, kBox = 25;
  double total = 0;
  std::int64_t levels = 0, rows = 0;
  for (const PictureEntry& entry : entries) {
    total += entry.seconds, rows += entry.rows;
    levels = std::max(levels, entry.level + 1);
  }
  levels = std::min<std::int64_t>(levels, 12);  // what is nested deeper is drawn on the last line
  std::string boxes;
  double at = 0;
  for (const PictureEntry& entry : entries) {
    // Where nothing is predicted, rows stand for seconds.
    const double width = total > 0  ? 100 * entry.seconds / total
                         : rows > 0 ? 100 * static_cast<double>(entry.rows) / static_cast<double>(rows)
                                    : 100.0 / static_cast<double>(entries.size());
    const double y = static_cast<double>(std::min(entry.level, levels - 1)) * kRow;
    const std::string title =
        text_of(entry.phase, ", ", meaning_of(entry), ": ", counted(entry.rows, " row", " rows"), " below ",
                counted(entry.path_rows, " row", " rows"), ", ", counted(entry.rollouts, " rollout", " rollouts"),
                entry.trees > 1 ? text_of(" of ", entry.trees, " trees") : text_of(" of tree ", entry.tree + 1),
                ", predicted ", shown(entry.seconds, Unit::seconds));
    boxes += box(at, y, std::max(width - 0.06, 0.04), kBox, "fill phase" + entry.phase, title);
    if (width > 3)
      boxes += text_of("<text class=\"onfill on", entry.phase, "\" text-anchor=\"middle\" x=\"",
                       coordinate(at + width / 2), "%\" y=\"", coordinate(y + 17), "\">", entry.phase, "</text>");
    at += width;
  }
  return text_of("<figure class=\"timeline\"><figcaption><strong>", escaped(what), "</strong> <span class=\"last\">",
                 total > 0 ? "predicted " + shown(total, Unit::seconds) : "", "</span></figcaption>",
                 "<svg width=\"100%\" height=\"", coordinate(static_cast<double>(levels) * kRow),
                 "\" role=\"img\"><title>Schedule: ", escaped(what), "</title><desc>", entries.size(),
                 " entries from left to right; waves stand below the trunks that they read.</desc>", boxes,
                 "</svg></figure>\n");
}

}  // namespace

std::string tree_figures(const PlanPicture& picture) {
  const std::size_t drawn = std::min(picture.trees.size(), kMostDrawnTrees);
  std::int64_t deepest = 0;
  for (std::size_t t = 0; t < drawn; ++t)
    for (std::int64_t i = 0; i < picture.trees[t].nodes; ++i) {
      const PictureNode& node = picture.nodes[picture.trees[t].first_node + i];
      deepest = std::max(deepest, node.begin + node.tokens);
    }
  std::string out;
  for (std::size_t t = 0; t < drawn; ++t) out += tree_figure(picture, t, deepest);
  return out;
}

std::string schedule_figures(const PlanPicture& picture) {
  const std::span<const PictureEntry> all = picture.schedule;
  if (all.empty()) return "";
  const bool whole = static_cast<std::int64_t>(all.size()) >= picture.entry_count;
  std::string out = timeline(
      all, whole ? "The whole step" : text_of("The first ", all.size(), " of ", picture.entry_count, " entries"));
  // As far as a trunk of the first line is closed, so that no half of one is enlarged.
  std::size_t end = std::min(kEnlarged, all.size());
  while (end < all.size() && end < 2 * kEnlarged && all[end].level > 0) ++end;
  if (end < all.size() && all[end].phase == "C") ++end;
  if (all.size() >= 2 * end) out += timeline(all.first(end), text_of("Its first ", end, " entries, enlarged"));
  return out;
}

}  // namespace espalier
