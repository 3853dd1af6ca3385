// inspect, convert, plan and replay from outside: their JSON, their text, and what they leave on the disk.
#include <gtest/gtest.h>

#include <algorithm>

#include "espalier/base/json.h"
#include "espalier/options/options.h"
#include "espalier/settings/option_help.h"
#include "tests/hostile/cli/program_run.h"

namespace espalier::testing {
namespace {

// Two groups of two, prompts of four and two tokens: 4+2, 4+3, 2+1, 2+2 tokens; once each, where shared: 4+2+3 + 2+1+1,
// for the last response begins with the third.
constexpr const char* kRollouts =
    "{\"prompt_ids\":[1,2,3,4],\"response_ids\":[5,6],\"group\":\"a\",\"reward\":1}\n"
    "{\"prompt_ids\":[1,2,3,4],\"response_ids\":[7,8,9],\"group\":\"a\",\"reward\":0}\n"
    "{\"prompt_ids\":[10,11],\"response_ids\":[5],\"group\":\"b\",\"reward\":1}\n"
    "{\"prompt_ids\":[10,11],\"response_ids\":[5,6],\"group\":\"b\",\"reward\":0,\"meta\":{\"k\":[1,2]}}\n";
constexpr int kLogical = 20, kPhysical = 13, kPromptsOnce = 14;

constexpr const char* kModel =
    "{\"architectures\":[\"Qwen3ForCausalLM\"],\"model_type\":\"qwen3\",\"hidden_size\":32,\"num_hidden_layers\":2,"
    "\"num_attention_heads\":4,\"num_key_value_heads\":2,\"head_dim\":8,\"intermediate_size\":64,\"vocab_size\":64,"
    "\"max_position_embeddings\":128,\"rms_norm_eps\":1e-6,\"rope_theta\":10000.0,\"hidden_act\":\"silu\","
    "\"tie_word_embeddings\":true}";

Json json_of(const Outcome& outcome) {
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  const Json json = Json::parse(outcome.out, nullptr, false);
  EXPECT_TRUE(json.is_object()) << outcome.out;
  return json;
}

TEST(Inspect, CountsTokensAndGroups) {
  const Folder folder;
  folder.put("r.jsonl", kRollouts);
  const Json json = json_of(run(folder.path(), {"inspect", "--json", "r.jsonl"}));
  EXPECT_EQ(json["verb"], "inspect");
  EXPECT_EQ(json["rollouts"], 4);
  EXPECT_EQ(json["groups"], 2);
  EXPECT_EQ(json["tokens"]["logical"], kLogical);
  EXPECT_EQ(json["tokens"]["physical"], kPhysical);
  EXPECT_EQ(json["n"]["p50"], 2);
  for (const char* name : {"p50", "p95"}) EXPECT_TRUE(json["prefix_share"].contains(name));
  EXPECT_TRUE(json["anomalies"].is_array());
  EXPECT_GT(json["peak_bytes"], 0);
  EXPECT_GT(json["threads"], 0);
}

TEST(Inspect, CountsAsShareSays) {
  const Folder folder;
  folder.put("r.jsonl", kRollouts);
  const auto physical = [&](const char* share) {
    return json_of(run(folder.path(), {"inspect", "--json", "--share", share, "r.jsonl"}))["tokens"]["physical"];
  };
  EXPECT_EQ(physical("auto"), kPhysical);
  EXPECT_EQ(physical("prompt"), kPromptsOnce);
  EXPECT_EQ(physical("off"), kLogical);
}

TEST(Inspect, TextGoesToStandardOutputAndNotesToStandardError) {
  const Folder folder;
  folder.put("r.jsonl", std::string(kRollouts) + "{\"prompt_ids\":[1],\"response_ids\":[2],\"strange\":1}\n");
  const Outcome loud = run(folder.path(), {"inspect", "r.jsonl"});
  EXPECT_EQ(loud.code, 0);
  EXPECT_NE(loud.out.find("rollouts"), loud.out.npos);
  EXPECT_NE(loud.err.find("strange"), loud.err.npos);
  const Outcome quiet = run(folder.path(), {"inspect", "--quiet", "r.jsonl"});
  EXPECT_EQ(quiet.err, "");
  EXPECT_EQ(quiet.out, loud.out);
}

TEST(Inspect, AnErrorNamesFileAndLine) {
  const Folder folder;
  folder.put("r.jsonl", std::string(kRollouts) + "{\"prompt_ids\":[1],\"response_ids\":[2],\"loss_mask\":[1,1]}\n");
  const Outcome outcome = run(folder.path(), {"inspect", "r.jsonl"});
  EXPECT_EQ(outcome.code, 3);
  EXPECT_NE(outcome.err.find("r.jsonl:5"), outcome.err.npos) << outcome.err;
  EXPECT_NE(outcome.err.find("loss_mask"), outcome.err.npos) << outcome.err;
}

TEST(Json, APathThatIsNoUtf8StillGivesJson) {
  const Folder folder;
  folder.put("\xff.jsonl", kRollouts);
  EXPECT_EQ(json_of(run(folder.path(), {"inspect", "--json", "\xff.jsonl"}))["rollouts"], 4);
  const Outcome missing = run(folder.path(), {"inspect", "--json", "\xff\xfe"});
  EXPECT_EQ(missing.code, 3);
  EXPECT_TRUE(Json::accept(missing.out)) << missing.out;
}

TEST(Config, TheCommandLineWins) {
  const Folder folder;
  folder.put("r.jsonl", kRollouts);
  folder.put("c.toml", "seed = 3\nlr = 1e-3\nthreads = 1\n[inspect]\nshare = \"off\"\n");
  const Json json = json_of(run(folder.path(), {"inspect", "--json", "--config", "c.toml", "--seed", "4", "r.jsonl"}));
  EXPECT_EQ(json["options"]["seed"], 4);
  EXPECT_EQ(json["options"]["share"], "off");
  EXPECT_EQ(json["options"]["threads"], 1);
  EXPECT_FALSE(json["options"].contains("lr"));
}

TEST(Config, AnUnknownKeyIsRefusedWithFileAndLine) {
  const Folder folder;
  folder.put("r.jsonl", kRollouts);
  folder.put("c.toml", "seed = 3\nsede = 3\n");
  const Outcome outcome = run(folder.path(), {"inspect", "--config", "c.toml", "r.jsonl"});
  EXPECT_EQ(outcome.code, 2);
  EXPECT_NE(outcome.err.find("c.toml:2"), outcome.err.npos) << outcome.err;
  EXPECT_NE(outcome.err.find("did you mean seed?"), outcome.err.npos) << outcome.err;
}

TEST(Options, TakeUnderscoresAndEqualSigns) {
  const Folder folder;
  folder.put("r.jsonl", kRollouts);
  folder.put("m/config.json", kModel);
  const Json json = json_of(run(folder.path(), {"plan", "--json", "--model", "m", "--rollouts=r.jsonl",
                                                "--mini_batch_size", "2", "--token_budget=64"}));
  EXPECT_EQ(json["options"]["mini_batch_size"], 2);
  EXPECT_EQ(json["options"]["token_budget"], 64);
}

TEST(Convert, WritesWhatReadsBackTheSame) {
  const Folder folder;
  folder.put("r.jsonl", kRollouts);
  const Json first = json_of(run(folder.path(), {"convert", "--json", "r.jsonl", "a.jsonl.gz"}));
  EXPECT_EQ(first["rollouts"], 4);
  EXPECT_EQ(json_of(run(folder.path(), {"convert", "--json", "a.jsonl.gz", "b.jsonl"}))["tokens"], kLogical);
  EXPECT_EQ(run(folder.path(), {"convert", "r.jsonl", "c.jsonl"}).code, 0);
  EXPECT_EQ(folder.read("b.jsonl"), folder.read("c.jsonl"));
  EXPECT_NE(folder.read("c.jsonl").find("\"k\""), std::string::npos);  // meta is carried through
}

TEST(Convert, ABadInputLeavesTheOutputAsItWas) {
  const Folder folder;
  folder.put("bad.jsonl", std::string(kRollouts) + "{\"prompt_ids\":[1],\"respo");
  EXPECT_EQ(run(folder.path(), {"convert", "bad.jsonl", "new.jsonl"}).code, 3);
  folder.put("old.jsonl", "precious");
  EXPECT_EQ(run(folder.path(), {"convert", "bad.jsonl", "old.jsonl"}).code, 2);
  EXPECT_EQ(run(folder.path(), {"convert", "--overwrite", "bad.jsonl", "old.jsonl"}).code, 3);
  EXPECT_EQ(folder.read("old.jsonl"), "precious");
  EXPECT_EQ(folder.names(), (std::vector<std::string>{"bad.jsonl", "old.jsonl"}));
}

TEST(Convert, AnOutputThatCannotBeWrittenIsWrongUsage) {
  const Folder folder;
  folder.put("r.jsonl", kRollouts);
  EXPECT_EQ(run(folder.path(), {"convert", "r.jsonl", "no/such/folder/b.jsonl"}).code, 2);
  EXPECT_EQ(run(folder.path(), {"convert", "r.jsonl", "/dev/full"}).code, 2);
  EXPECT_EQ(folder.names(), (std::vector<std::string>{"r.jsonl"}));
}

// Whatever the option table calls an output may not be what it calls an input, for every verb.
TEST(Paths, NoOutputIsAnInput) {
  for (const auto& [letter, verb] : verb_names())
    for (const OptionRow& output : option_rows())
      for (const OptionRow& input : option_rows()) {
        const PathRole role = path_role(output, letter);
        if (!output.taken_by(letter) || role == PathRole::none || role == PathRole::input || role == PathRole::models)
          continue;
        if (!input.taken_by(letter) || path_role(input, letter) != PathRole::input) continue;
        if (input.name == std::string("resume") && output.name == std::string("out")) continue;  // continued in place
        const Folder folder;
        folder.put("same/file", "precious");
        std::filesystem::create_symlink("same", folder.path() / "link");
        const std::string end = role == PathRole::output_file ? "/file" : "";
        std::vector<std::string> words = {verb, std::string("--") + input.name, "same" + end,
                                          std::string("--") + output.name, "link" + end};
        if (verb == std::string("merge")) words.insert(words.begin() + 1, "other-adapter");
        for (const char* needed : {"model", "rollouts", "prompts", "out"}) {
          const OptionRow& row = *find_option(needed);
          if (!row.taken_by(letter) || row.name == std::string(input.name) || row.name == std::string(output.name))
            continue;
          words.push_back(std::string("--") + needed);
          words.push_back(std::string("other-") + needed);
        }
        const Outcome outcome = run(folder.path(), words);
        EXPECT_EQ(folder.read("same/file"), "precious");
        EXPECT_EQ(folder.names(), (std::vector<std::string>{"link", "same"}));
        if (outcome.code == 4) {  // the two exclude each other, whatever they name
          EXPECT_NE(outcome.err.find(" at --"), std::string::npos) << verb << outcome.err;
          continue;
        }
        EXPECT_EQ(outcome.code, 2) << verb << ' ' << output.name << ' ' << input.name << outcome.err;
        EXPECT_NE(outcome.err.find(std::string(" at --") + output.name), std::string::npos) << verb << outcome.err;
        EXPECT_NE(outcome.err.find(std::string("than --") + input.name), std::string::npos) << verb << outcome.err;
      }
}

TEST(Options, AreSaidOnceUnlessTheyAreLists) {
  const Folder folder;
  folder.put("r.jsonl", kRollouts);
  folder.put("m/config.json", kModel);
  const std::vector<std::string> plan = {"plan", "--json", "--model", "m", "--rollouts", "r.jsonl"};
  const auto outcome = [&](std::vector<std::string> more) {
    more.insert(more.begin(), plan.begin(), plan.end());
    return run(folder.path(), more);
  };
  for (const std::vector<std::string>& twice : {std::vector<std::string>{"--seed", "1", "--seed", "1"},
                                                {"--mini-batch-size", "2", "--mini_batch_size=4"},
                                                {"--model", "m"},
                                                {"--explain", "--explain"},
                                                {"--config", "a.toml", "--config", "b.toml"}}) {
    const Outcome refused = outcome(twice);
    EXPECT_EQ(refused.code, 2) << twice[0];
    EXPECT_NE(refused.out.find("one value"), std::string::npos) << refused.out;
  }
  EXPECT_EQ(json_of(outcome({"--rollouts", "r.jsonl"}))["rows"]["logical"], 2 * kLogical);
}

TEST(Rollouts, ComeFromSeveralFilesAFolderAndStandardInput) {
  const Folder folder;
  for (const char* name : {"d/part10.jsonl", "d/part2.jsonl", "d/part1.jsonl"})
    folder.put(name, std::string("{\"prompt_ids\":[1],\"response_ids\":[2],\"id\":\"") + name + "\",\"reward\":1}\n");
  folder.put("d/notes.txt", "mine");
  folder.put("m/config.json", kModel);
  const auto rows = [&](const std::vector<std::string>& words) {
    std::vector<std::string> all = {"plan", "--json", "--model", "m", "--share", "off", "--rollouts"};
    all.insert(all.end(), words.begin(), words.end());
    return json_of(run(folder.path(), all))["rows"]["logical"].get<int>();
  };
  EXPECT_EQ(rows({"d"}), 6);
  EXPECT_EQ(rows({"d/part1.jsonl", "d/part2.jsonl"}), 4);  // as a shell expands d/*.jsonl
  EXPECT_EQ(rows({"d/part1.jsonl", "--rollouts=d/part2.jsonl", "--rollouts", "d"}), 10);
  folder.put("c.toml", "model = \"m\"\nrollouts = [\"d/part1.jsonl\", \"d/part10.jsonl\"]\nshare = \"off\"\n");
  EXPECT_EQ(json_of(run(folder.path(), {"plan", "--json", "--config", "c.toml"}))["rows"]["logical"], 4);
  ASSERT_EQ(run(folder.path(), {"convert", "d", "all.jsonl.zst"}).code, 0);
  ASSERT_EQ(run(folder.path(), {"convert", "all.jsonl.zst", "all.jsonl"}).code, 0);
  const std::string text = folder.read("all.jsonl");
  EXPECT_EQ(folder.read("all.jsonl.zst").substr(0, 4), "\x28\xb5\x2f\xfd");
  EXPECT_LT(text.find("part1.jsonl"), text.find("part2.jsonl"));
  EXPECT_LT(text.find("part2.jsonl"), text.find("part10.jsonl"));
  const Outcome fed = Started(folder.path(), {"inspect", "--json", "-"}, Output::caught, false, "all.jsonl").wait();
  EXPECT_EQ(json_of(fed)["rollouts"], 3);
}

TEST(Rollouts, AFolderOfSeveralKindsIsRefused) {
  const Folder folder;
  folder.put("d/a.jsonl", kRollouts);
  folder.put("d/train_data_step1.jsonl", kRollouts);
  const Outcome outcome = run(folder.path(), {"inspect", "d"});
  EXPECT_EQ(outcome.code, 3);
  EXPECT_NE(outcome.err.find("several"), std::string::npos) << outcome.err;
}

TEST(Plan, NeedsNoWeightsAndPredictsEverySchedule) {
  const Folder folder;
  folder.put("r.jsonl", kRollouts);
  folder.put("m/config.json", kModel);
  const Json json = json_of(run(folder.path(), {"plan", "--json", "--model", "m", "--rollouts", "r.jsonl"}));
  for (const char* schedule : {"dense", "packed", "phased", "chosen"}) {
    EXPECT_GT(json["flops"][schedule], 0) << schedule;
    EXPECT_GT(json["predicted"][schedule]["seconds"], 0) << schedule;
    for (const char* phase : {"A", "B", "C"}) EXPECT_TRUE(json["predicted"][schedule]["peak_bytes"].contains(phase));
  }
  EXPECT_EQ(json["rows"]["logical"], kLogical);
  EXPECT_GE(json["ceiling"], 1);
  std::int64_t logical = 0;
  for (const Json& tree : json["trees"]) {
    for (const char* name : {"schedule", "trunks", "waves", "rows", "reason"}) EXPECT_TRUE(tree.contains(name)) << name;
    logical += tree["rows"]["logical"].get<std::int64_t>();
  }
  EXPECT_EQ(logical, kLogical);
}

TEST(Plan, AStepForEachMiniBatch) {
  const Folder folder;
  folder.put("r.jsonl", kRollouts);
  folder.put("m/config.json", kModel);
  const Json json = json_of(
      run(folder.path(), {"plan", "--json", "--model", "m", "--rollouts", "r.jsonl", "--mini-batch-size", "2"}));
  ASSERT_EQ(json["steps"].size(), 2u);
  EXPECT_EQ(json["steps"][0]["rows"]["logical"], 13);
  EXPECT_EQ(json["steps"][1]["rows"]["logical"], 7);
  EXPECT_EQ(json["rows"]["logical"], kLogical);
}

TEST(Plan, TakesDegreesThatThisMachineCouldNeverRun) {
  const Folder folder;
  folder.put("r.jsonl", kRollouts);
  folder.put("m/config.json", kModel);
  const Json json = json_of(
      run(folder.path(), {"plan", "--json", "--model", "m", "--rollouts", "r.jsonl", "--tp", "2", "--dp", "512"}));
  EXPECT_EQ(json["layout"]["processes"], 1024);
  EXPECT_EQ(json["layout"]["by_rank"].size(), 512u);
}

TEST(Plan, ATextForAPerson) {
  const Folder folder;
  folder.put("r.jsonl", kRollouts);
  folder.put("m/config.json", kModel);
  const Outcome plain = run(folder.path(), {"plan", "--model", "m", "--rollouts", "r.jsonl"});
  const Outcome explained = run(folder.path(), {"plan", "--model", "m", "--rollouts", "r.jsonl", "--explain"});
  EXPECT_EQ(plain.code, 0);
  EXPECT_NE(plain.out.find("dense"), plain.out.npos);
  EXPECT_GT(explained.out.size(), plain.out.size());
}

TEST(Plan, OneThatDoesNotFitIsShownAndIsExitCode5) {
  const Folder folder;
  folder.put("r.jsonl", kRollouts);
  folder.put("m/config.json", kModel);
  const std::vector<std::string> words = {"plan", "--model", "m", "--rollouts", "r.jsonl", "--memory-budget", "100MiB"};
  const Outcome text = run(folder.path(), words);
  EXPECT_EQ(text.code, 5) << text.err;
  for (const char* shown : {"predicted", "does not fit the budget", "are missing", "--memory-budget"})
    EXPECT_NE(text.out.find(shown), text.out.npos) << shown;
  std::vector<std::string> as_json = words;
  as_json.push_back("--json");
  const Outcome outcome = run(folder.path(), as_json);
  EXPECT_EQ(outcome.code, 5);
  const Json json = Json::parse(outcome.out);
  EXPECT_EQ(json["fits"], false);
  std::int64_t peak = 0;
  for (const Json& of_phase : json["predicted"]["chosen"]["peak_bytes"])
    peak = std::max(peak, of_phase.get<std::int64_t>());
  EXPECT_EQ(json["missing_bytes"], peak - (100 << 20));
  EXPECT_EQ(json["rows"]["logical"], kLogical);
}

TEST(Plan, IsForMachinesThatAreNotThere) {
  const Folder folder;
  folder.put("r.jsonl", kRollouts);
  folder.put("m/config.json", kModel);
  const auto plan = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"plan", "--json", "--model", "m", "--rollouts", "r.jsonl", "--dtype", "bfloat16"});
    return run(folder.path(), more);
  };
  const Json h200 = json_of(plan({"--machine", "h200"})), any = json_of(plan({"--device", "cuda"}));
  EXPECT_NE(h200["machine"].get<std::string>().find("H200"), std::string::npos) << h200["machine"];
  EXPECT_NE(any["machine"].get<std::string>().find("H100"), std::string::npos) << any["machine"];
  for (const Json& json : {h200, any}) {
    EXPECT_EQ(json["device"], "cuda");
    EXPECT_EQ(json["fits"], true);
    EXPECT_EQ(json["missing_bytes"], 0);
  }
  EXPECT_EQ(h200["memory_budget"], std::int64_t{139} << 30);
  const Outcome unknown = plan({"--machine", "b300"});
  EXPECT_EQ(unknown.code, 2);
  EXPECT_NE(unknown.err.find("h100, h200, a100"), std::string::npos) << unknown.err;
  folder.put("bad.json", "{}");
  EXPECT_EQ(plan({"--machine", "bad.json"}).code, 3);
}

// Eight billion parameters: 147 GB with their optimizer, which four of 79 GiB hold together.
TEST(Plan, OfALayoutHasTheMemoryOfItsProcesses) {
  const Folder folder;
  folder.put("r.jsonl", kRollouts);
  Json config = Json::parse(kModel);
  config.update({{"hidden_size", 4096},
                 {"num_hidden_layers", 36},
                 {"num_attention_heads", 32},
                 {"num_key_value_heads", 8},
                 {"head_dim", 128},
                 {"intermediate_size", 12288},
                 {"vocab_size", 151936},
                 {"tie_word_embeddings", false}});
  folder.put("m/config.json", config.dump());
  const auto plan = [&](const char* tp) {
    return run(folder.path(), {"plan", "--json", "--model", "m", "--rollouts", "r.jsonl", "--dtype", "bfloat16",
                               "--machine", "h100", "--tp", tp});
  };
  const Outcome alone = plan("1");
  EXPECT_EQ(alone.code, 5) << alone.err;
  EXPECT_GT(Json::parse(alone.out)["missing_bytes"], std::int64_t{50} << 30);
  const Json four = json_of(plan("4"));
  EXPECT_EQ(four["fits"], true);
  EXPECT_EQ(four["predicted"]["chosen"]["fits"], true);
  EXPECT_EQ(four["memory_budget"], std::int64_t{79} << 30);
}

TEST(Plan, ATokenBeyondTheVocabularyIsABadInput) {
  const Folder folder;
  folder.put("r.jsonl", "{\"prompt_ids\":[1],\"response_ids\":[64]}\n");
  folder.put("m/config.json", kModel);
  EXPECT_EQ(run(folder.path(), {"plan", "--model", "m", "--rollouts", "r.jsonl"}).code, 3);
}

TEST(Replay, ADtypeThatIsNoNameIsABadInput) {
  const Folder folder;
  folder.put("config.json", kModel);
  folder.put("r.jsonl", kRollouts);
  folder.put("trace.json",
             "{\"model\":\"config.json\",\"rollouts\":\"r.jsonl\",\"dtype\":5,\"steps\":[],\"checkpoints\":[]}");
  const Outcome outcome = run(folder.path(), {"replay", "."});
  EXPECT_EQ(outcome.code, 3) << outcome.err;
  EXPECT_NE(outcome.err.find("\"dtype\""), std::string::npos) << outcome.err;
}

}  // namespace
}  // namespace espalier::testing
