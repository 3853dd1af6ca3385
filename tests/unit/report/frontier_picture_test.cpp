// The picture of the frontier: a whole SVG file with a line for each way that holds anything.
#include "espalier/report/frontier_picture.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace espalier {
namespace {

Frontier drawn() {
  Frontier frontier;
  frontier.memory_budget = std::int64_t{4} << 30, frontier.response = 2048;
  frontier.ways = {"dense", "phased <keep>", "phased, offload"};
  frontier.sizes = {2, 16};
  for (const std::int64_t n : frontier.sizes)
    for (const std::int64_t prompt : {4000, 0, 64000}) {
      FrontierCell cell;
      cell.n = n, cell.prompt = prompt, cell.way = prompt == 4000 ? "dense" : "phased";
      frontier.cells.push_back(cell);
    }
  return frontier;
}

std::ptrdiff_t count(const std::string& text, const std::string& part) {
  std::ptrdiff_t found = 0;
  for (std::size_t at = 0; (at = text.find(part, at)) != text.npos; at += part.size()) ++found;
  return found;
}

TEST(FrontierPicture, DrawsALineForEachWayThatHoldsSomething) {
  const std::string svg = frontier_picture(drawn());
  EXPECT_TRUE(svg.starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\""));
  EXPECT_TRUE(svg.ends_with("</svg>\n"));
  EXPECT_EQ(count(svg, "<path class=\"line c"), 2);
  EXPECT_EQ(count(svg, "<circle"), 4);
  EXPECT_NE(svg.find("class=\"line c3\""), svg.npos);
  EXPECT_NE(svg.find("64,000 tokens"), svg.npos);
  EXPECT_NE(svg.find("4.00 GiB"), svg.npos);
  EXPECT_EQ(svg.find("<keep>"), svg.npos);
  EXPECT_EQ(svg.find("nan"), svg.npos);
}

TEST(FrontierPicture, OfNothingIsStillAPicture) {
  Frontier frontier = drawn();
  for (FrontierCell& cell : frontier.cells) cell.prompt = 0;
  const std::string svg = frontier_picture(frontier);
  EXPECT_EQ(count(svg, "<circle"), 0);
  EXPECT_EQ(svg.find("nan"), svg.npos);
  EXPECT_EQ(svg.find("inf"), svg.npos);
}

}  // namespace
}  // namespace espalier
