// Reading of run folders: whole, stopped in the middle of a line, damaged.
#include "espalier/report/run_record.h"

#include <gtest/gtest.h>

#include "espalier/base/error.h"
#include "tests/unit/report/run_folder.h"

namespace espalier {
namespace {

using testing::RunFolderOnDisk;
using testing::whole_run;

// Where an InputError of read_run points; empty: there is none.
std::string refused_at(const std::filesystem::path& folder) {
  try {
    read_run(folder);
    return "";
  } catch (const InputError& error) {
    EXPECT_FALSE(error.text().remedy.empty()) << error.what();
    return error.text().where;
  }
}

TEST(ReadRun, SortsTheLinesByKind) {
  const RunFolderOnDisk folder;
  folder.put("run.json", R"({"espalier": "1.2.3"})");
  folder.put("metrics.jsonl", whole_run());
  const RunRecord run = read_run(folder.path());
  EXPECT_EQ(run.name, folder.path().filename().string());
  EXPECT_EQ(run.about["espalier"], "1.2.3");
  EXPECT_EQ(run.warm_start.size(), 1u);
  EXPECT_EQ(run.steps.size(), 2u);
  EXPECT_EQ(run.evaluations.size(), 2u);
  EXPECT_EQ(run.samples.size(), 2u);
  EXPECT_FALSE(run.picture.has_value());
  EXPECT_TRUE(run.notes.empty());
  EXPECT_EQ(points_of(run.steps, "/grad_norm"), (Points{{1, 0.71}, {2, 0.72}}));
}

TEST(ReadRun, AHalfLastLineIsLeftOutWithANote) {
  const RunFolderOnDisk folder;
  folder.put("run.json", "{}");
  folder.put("metrics.jsonl", whole_run() + R"({"kind": "step", "step": 3)");
  const RunRecord run = read_run(folder.path());
  EXPECT_EQ(run.steps.size(), 2u);
  ASSERT_EQ(run.notes.size(), 1u);
  EXPECT_NE(run.notes[0].find("(8)"), std::string::npos) << run.notes[0];
}

TEST(ReadRun, KindsOfLaterVersionsArePassedOverWithANote) {
  const RunFolderOnDisk folder;
  folder.put("run.json", "{}");
  folder.put("metrics.jsonl", R"({"kind": "weather", "rain": true})"
                              "\n" +
                                  whole_run());
  EXPECT_EQ(read_run(folder.path()).notes.size(), 1u);
}

TEST(ReadRun, NullAndAbsentNumbersAreNoPoints) {
  const RunFolderOnDisk folder;
  folder.put("run.json", "{}");
  folder.put("metrics.jsonl", R"({"kind": "step", "step": 1, "loss": null})"
                              "\n"
                              R"({"kind": "step", "step": 2, "loss": 3})"
                              "\n"
                              R"({"kind": "step", "step": 3, "seconds": 4, "loss": "7"})"
                              "\n");
  const RunRecord run = read_run(folder.path());
  EXPECT_EQ(points_of(run.steps, "/loss"), (Points{{2, 3}}));
  EXPECT_TRUE(points_of(run.steps, "/seconds/total").empty());
}

TEST(ReadRun, TheOutputOfTrainIsARun) {
  const RunFolderOnDisk folder;
  folder.put("train.json", R"({"espalier": "1.2.3", "verb": "train", "steps": [{"step": 1, "loss": 0.5}]})");
  const RunRecord run = read_run(folder.path());
  EXPECT_EQ(run.steps.size(), 1u);
  EXPECT_EQ(run.about["verb"], "train");
  EXPECT_FALSE(run.about.contains("steps"));
}

TEST(ReadRun, DamageIsAnInputErrorThatNamesThePlace) {
  const RunFolderOnDisk folder;
  const std::string path = folder.path().string();
  EXPECT_EQ(refused_at(folder.path() / "absent"), path + "/absent");
  EXPECT_EQ(refused_at(folder.path()), path);
  folder.put("metrics.jsonl", whole_run());
  try {
    read_run(folder.path());
    ADD_FAILURE() << "run.json is missing";
  } catch (const InputError& error) {
    EXPECT_EQ(error.text().where, path + "/run.json");
  }
  folder.put("run.json", "{}");
  EXPECT_EQ(refused_at(folder.path()), "");
  const auto with_line = [&](const std::string& line) { folder.put("metrics.jsonl", whole_run() + line + "\n"); };
  for (const char* line : {R"({"kind": "step", "step": 3,)", R"({"step": 3})", R"({"kind": 3})", R"({"kind": "step"})",
                           R"({"kind": "step", "step": "3"})", R"({"kind": "step", "step": -1})",
                           R"({"kind": "step", "step": 18446744073709551615})", R"({"kind": "sample", "step": 1.5})",
                           R"({"kind": "picture", "step": 3})", R"({"kind": "picture", "step": 3, "plan": [1]})"}) {
    with_line(line);
    EXPECT_EQ(refused_at(folder.path()), path + "/metrics.jsonl:8") << line;
  }
  folder.put("metrics.jsonl", "");
  EXPECT_EQ(refused_at(folder.path()), path);
}

TEST(ReadRun, AnErrorInThePlaceOfTrainsOutputIsRefused) {
  const RunFolderOnDisk folder;
  for (const char* text :
       {R"({"error": {"kind": "input"}, "exit_code": 3})", R"({"steps": [3]})", R"({"steps": [{}]})"}) {
    folder.put("train.json", text);
    EXPECT_EQ(refused_at(folder.path()).rfind((folder.path() / "train.json").string(), 0), 0u) << text;
  }
}

}  // namespace
}  // namespace espalier
