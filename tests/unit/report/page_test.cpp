// The page as text: what it shows, what it leaves out, what it never lets through.
#include "espalier/report/page.h"

#include <gtest/gtest.h>

#include "espalier/base/error.h"
#include "espalier/report/report.h"
#include "tests/unit/plan/shapes.h"
#include "tests/unit/report/run_folder.h"

namespace espalier {
namespace {

using testing::RunFolderOnDisk;
using testing::whole_run;

std::string page_of_lines(const std::string& lines, const std::string& about = R"({"espalier": "1.2.3"})") {
  const RunFolderOnDisk folder;
  folder.put("run.json", about);
  folder.put("metrics.jsonl", lines);
  return page_of(read_run(folder.path()));
}

void expect_shown(const std::string& page, std::initializer_list<const char*> parts) {
  for (const char* part : parts) EXPECT_NE(page.find(part), std::string::npos) << part;
}

void expect_absent(const std::string& page, std::initializer_list<const char*> parts) {
  for (const char* part : parts) EXPECT_EQ(page.find(part), std::string::npos) << part;
}

TEST(Page, ShowsTheNumbersOfARun) {
  const std::string page = page_of_lines(whole_run());
  expect_shown(page, {"12.5 % &rarr;</span> 87.5 %",               // accuracy before and after
                      "<dd>6 s</dd>",                              // generate 3, score 1, update 2
                      "generate 3 s, score 1 s, update 2 s",       //
                      "<dd>75.0 %</dd>", "2,000 computed, 8,000",  // tokens
                      "<dd>3.00 MiB</dd>", "4.00 MiB", "75.0 % of it",
                      ">other</span></th><td>250 ms</td><td>4.2 %</td>",  // 2 - 1.75, of 6
                      "5.625", "13.5"});
}

TEST(Page, LeavesOutWhatTheRunDoesNotHave) {
  const std::string full = page_of_lines(whole_run());
  expect_shown(full, {"<h2>Memory</h2>", "<h2>Sample responses</h2>", ">Reward<", ">KL to the reference<"});
  expect_absent(full, {"<h2>Prefix trees", "Router", "Groups dropped"});
  const std::string bare = page_of_lines(R"({"kind": "step", "step": 1, "loss": 0.5})"
                                         "\n");
  expect_shown(bare, {">Loss<"});
  expect_absent(bare, {"<h2>Memory", "<h2>Time", "<h2>Sample", "<h2>Prefix", ">Reward<", "time of a step",
                       "peak memory", "accuracy", "nan", "inf"});
}

TEST(Page, SaysThatALossIsZeroByConstructionWhereItIs) {
  const auto page = [](const char* loss, const char* clipped) {
    return page_of_lines(text_of(R"({"kind": "step", "step": 1, "loss": )", loss, R"(, "pg_loss": )", loss,
                                 R"(, "clip_fraction": )", clipped, "}\n"));
  };
  expect_shown(page("1e-8", "0"), {"0 by construction"});
  expect_shown(page("0.01", "0"), {"near 0 by construction"});
  expect_absent(page("1e-8", "0.25"), {"by construction"});
  expect_shown(page("1e-8", "0.25"), {"what the update minimises"});
}

TEST(Page, NamesThePhasesBeforeTheirLettersAreUsed) {
  const std::string page = page_of_lines(whole_run());
  const std::size_t named = page.find("A, trunk forward: what rollouts share");
  ASSERT_NE(named, std::string::npos);
  for (const char* later : {"A, B and C", ">A, trunk forward<", ">B, waves<", "phaseA\"></i>"})
    EXPECT_GT(page.find(later, page.find("</style>")), named) << later;
}

TEST(Page, TextsOfARunCannotBecomeMarkup) {
  const std::string evil = R"(</pre><script>alert(1)</script><img src=x onerror=\"a()\">)";
  std::string lines = whole_run();
  for (const char* field : {"prompt", "response", "expected"})
    lines += R"({"kind": "sample", "step": 2, ")" + std::string(field) + R"(": ")" + evil + field + "\"}\n";
  const std::string page =
      page_of_lines(lines, R"({"espalier": ")" + evil + R"(", ")" + evil + R"(": {"<b>": "<i>"}})");
  expect_absent(page, {"<script", "<img", "<b><", "<i>"});
  expect_shown(page, {"&lt;script&gt;alert(1)&lt;/script&gt;"});
}

TEST(Page, NeedsNothingButItself) {
  const std::string page = page_of_lines(whole_run());
  expect_absent(page, {"<script", "http://", "https://", "@import", "url(", "<link", " src="});
  expect_shown(page, {"<meta name=\"viewport\"", "prefers-color-scheme: dark", "@media print", "default-src 'none'"});
}

TEST(Page, ALongTextIsFoldedAndKeptWhole) {
  const std::string text(1000, 'x');
  const std::string page = page_of_lines(R"({"kind": "step", "step": 1, "loss": 1})"
                                         "\n"
                                         R"({"kind": "sample", "step": 1, "prompt": ")" +
                                         text + "y\", \"response\": \"r\"}\n");
  expect_shown(page, {"<summary>1001 bytes", (text + "y</pre></details>").c_str()});
}

TEST(Page, SamplesOfOnePromptStandBesideEachOther) {
  const std::string page = page_of_lines(whole_run());
  const std::size_t before = page.find("<strong>before</strong> step 0"),
                    after = page.find("<strong>after</strong> step 2");
  ASSERT_NE(before, std::string::npos);
  ASSERT_NE(after, std::string::npos);
  EXPECT_LT(before, after);
  EXPECT_EQ(page.find("<h3>Prompt 2</h3>"), std::string::npos);
}

TEST(Page, DrawsThePictureOfAPlan) {
  const std::vector<Rollout> batch = testing::group_of(40, 12, 4);
  PlanOptions options;
  options.schedule = Schedule::phased;
  const Json line = {{"kind", "picture"}, {"step", 2}, {"plan", plan_picture(testing::planned(batch, options), batch)}};
  const std::string page = page_of_lines(whole_run() + line.dump() + "\n");
  expect_shown(page, {"<h2>Prefix trees and schedule</h2>", "88 tokens once, instead of 208",
                      "40 tokens of prompt, depths 0 to 39, in 4 rollouts", "A, trunk forward: 39 rows below 0 rows",
                      "C, trunk backward: 39 rows", "B, wave: "});
}

TEST(Page, APictureWhoseSumsOverflowIsRefused) {
  const std::vector<Rollout> batch = testing::group_of(40, 12, 4);
  const auto expect_refused = [&](const char* what, std::size_t entries, const char* field, const Json& value) {
    Json line = {{"kind", "picture"}, {"step", 2}, {"plan", plan_picture(testing::planned(batch, {}), batch)}};
    Json entry = line["plan"]["schedule"][0];
    entry[field] = value;
    line["plan"]["schedule"] = std::vector<Json>(entries, entry);
    EXPECT_THROW(page_of_lines(whole_run() + line.dump() + "\n"), InputError) << what;
  };
  // 8192 times 2^50 is the first integer beyond 64 bits with a sign, 2e308 the first double that is infinite.
  expect_refused("rows", 8192, "rows", std::int64_t{1} << 50);
  expect_refused("seconds", 2, "seconds", 1e308);
}

TEST(WriteReport, WritesThePageAndEventsWhereThereAreNone) {
  const RunFolderOnDisk folder;
  folder.put("run.json", "{}");
  folder.put("metrics.jsonl", whole_run());
  const ReportFiles first = write_report(folder.path(), {});
  EXPECT_EQ(first.page.filename(), "report.html");
  EXPECT_FALSE(first.events.empty());
  EXPECT_EQ(folder.get("report.html").rfind("<!DOCTYPE html>", 0), 0u);
  EXPECT_TRUE(write_report(folder.path(), {}).events.empty());
  const ReportFiles other = write_report(folder.path(), folder.path() / "other.html");
  EXPECT_EQ(other.page.filename(), "other.html");
  EXPECT_EQ(folder.get("other.html"), folder.get("report.html"));
}

}  // namespace
}  // namespace espalier
