#include "espalier/options/options.h"

#include <set>

#include "espalier/options/nearest_option.h"
#include "espalier/options/option_value.h"
#include "espalier/options/options_json.h"
#include "tests/unit/options/thrown_error.h"

namespace espalier {
namespace {

using testing::thrown_error;

TEST(OptionTable, EveryDefaultPassesItsOwnCheck) {
  for (const OptionRow& row : option_rows()) EXPECT_NO_THROW(check_value(row, row.default_text, row.name)) << row.name;
  EXPECT_NO_THROW(validate(Options{}));
}

TEST(OptionTable, EveryVerbKnowsWhatItDoesWithAPathItTakes) {
  for (const OptionRow& row : option_rows())
    for (const char verb : std::string("icptsvbrglo")) {
      const bool knows = path_role(row, verb) != PathRole::none;
      if (row.taken_by(verb)) {
        EXPECT_EQ(knows, row.is_path()) << row.name << " " << verb;
      }
    }
  EXPECT_EQ(path_role(*find_option("out"), 't'), PathRole::output_folder);
  EXPECT_EQ(path_role(*find_option("out"), 'l'), PathRole::output_run);
  EXPECT_EQ(path_role(*find_option("out"), 's'), PathRole::output_records);
  EXPECT_EQ(path_role(*find_option("model"), 't'), PathRole::input);
  EXPECT_EQ(path_role(*find_option("lr"), 't'), PathRole::none);
}

TEST(OptionTable, AVerbMayHaveADefaultOfItsOwn) {
  EXPECT_EQ(default_options('t').save_freq, 0);
  EXPECT_EQ(default_options('l').save_freq, 10);
}

TEST(Paths, SeveralAreAnArrayInJsonAndOneIsAText) {
  Options options;
  const std::vector<std::string> paths = {"a,b.jsonl", "c d.jsonl", "-"};
  set_option(options, "rollouts", paths[0] + kBetweenPaths + paths[1] + kBetweenPaths + paths[2]);
  EXPECT_EQ(split_paths(options.rollouts), paths);
  EXPECT_EQ(options_to_json(options)["rollouts"], Json(paths));
  EXPECT_EQ(options_from_json(options_to_json(options), "f").rollouts, options.rollouts);
  options.rollouts = paths[0];
  EXPECT_EQ(options_to_json(options)["rollouts"], paths[0]);
  EXPECT_EQ(split_paths("").size(), 0u);
}

TEST(OptionTable, FieldIsTheNameWithUnderscoresAndNoNameStandsTwice) {
  std::set<std::string> seen;
  for (const OptionRow& row : option_rows()) {
    std::string field = row.name;
    for (char& c : field) c = c == '-' ? '_' : c;
    EXPECT_EQ(field, row.field);
    EXPECT_TRUE(seen.insert(row.name).second) << row.name;
    EXPECT_STRNE(row.section, "") << row.name;
    EXPECT_STRNE(row.help, "") << row.name;
  }
}

TEST(OptionTable, EveryOptionIsTakenByAVerb) {
  for (const OptionRow& row : option_rows()) {
    const std::string verbs = row.verbs;
    EXPECT_TRUE(!verbs.empty() &&
                verbs.find_first_not_of("icptsvrbglodaexICPTSVRBGLODAEX", verbs[0] == '*') == verbs.npos)
        << row.name;
  }
}

TEST(OptionTable, EveryTextReadsBackAsItself) {
  Options options;
  for (const OptionRow& row : option_rows()) {
    const std::string before = option_text(options, row.name);
    EXPECT_EQ(before, row.default_text) << row.name;
    set_option(options, row.name, before);
    EXPECT_EQ(option_text(options, row.name), before) << row.name;
  }
}

TEST(OptionTable, EveryChoiceIsAcceptedAndAStrangerIsNot) {
  for (const OptionRow& row : option_rows()) {
    if (!has_choices(row)) continue;
    const std::string range = row.range;
    for (std::size_t begin = 0; begin <= range.size();) {
      const std::size_t end = std::min(range.find('|', begin), range.size());
      EXPECT_NO_THROW(check_value(row, range.substr(begin, end - begin), row.name)) << row.name;
      begin = end + 1;
    }
    EXPECT_THROW(check_value(row, "no-such-word", row.name), OptionError) << row.name;
    EXPECT_THROW(check_value(row, range, row.name), OptionError) << row.name;
  }
}

TEST(SetOption, ChangesExactlyTheOptionThatIsNamed) {
  Options options;
  set_option(options, "clip-ratio-high", "0.28");
  EXPECT_EQ(options.clip_ratio_high, 0.28);
  for (const OptionRow& row : option_rows())
    EXPECT_EQ(option_text(options, row.name) == row.default_text, std::string(row.name) != "clip-ratio-high")
        << row.name;
}

TEST(SetOption, TakesDashesAndUnderscores) {
  Options options;
  set_option(options, "clip_ratio_low", "0.1");
  EXPECT_EQ(options.clip_ratio_low, 0.1);
  set_option(options, "clip-ratio_low", "0.15");
  EXPECT_EQ(options.clip_ratio_low, 0.15);
}

TEST(SetOption, KeepsOpenAndClosedEndsOfARange) {
  Options options;
  EXPECT_NO_THROW(set_option(options, "clip-ratio-low", "0"));
  EXPECT_NO_THROW(set_option(options, "clip-ratio-low", "1"));
  EXPECT_THROW(set_option(options, "clip-ratio-low", "1.0000001"), OptionError);
  EXPECT_THROW(set_option(options, "clip-ratio-low", "-0.1"), OptionError);
  EXPECT_THROW(set_option(options, "clip-ratio-c", "1"), OptionError);
  EXPECT_THROW(set_option(options, "betas", "0.9,1"), OptionError);
  EXPECT_NO_THROW(set_option(options, "entropy-coeff", "-0.5"));
  EXPECT_NO_THROW(set_option(options, "seed", "9223372036854775807"));
  EXPECT_EQ(options.seed, 9223372036854775807);
}

TEST(SetOption, RefusesWhatIsNoNumber) {
  Options options;
  for (const char* text : {"", "abc", "1e", "0x10", "1,5", "nan", "inf", "-inf", "1e400", " 1", "1 "})
    EXPECT_THROW(set_option(options, "lr", text), OptionError) << text;
  for (const char* text : {"", "1.5", "1e3", "9223372036854775808", "-1", "two"})
    EXPECT_THROW(set_option(options, "threads", text), OptionError) << text;
  for (const char* text : {"", "yes", "2", "True "})
    EXPECT_THROW(set_option(options, "explain", text), OptionError) << text;
  for (const char* text : {"", ",", "0.9,", ",0.9", "0.9 0.99", "0.9;0.99"})
    EXPECT_THROW(set_option(options, "betas", text), OptionError) << text;
  EXPECT_EQ(option_text(options, "lr"), option_text(Options{}, "lr"));
}

TEST(SetOption, SaysWhatItTakesAndWhatWasGiven) {
  Options options;
  const ErrorText range = thrown_error<OptionError>([&] { set_option(options, "clip_ratio_low", "7"); });
  EXPECT_EQ(range.where, "--clip-ratio-low");
  EXPECT_EQ(range.expected, "a number in [0, 1]");
  EXPECT_EQ(range.got, "\"7\"");
  const ErrorText choice = thrown_error<OptionError>([&] { set_option(options, "schedule", "fased", "run.toml:3: "); });
  EXPECT_EQ(choice.where, "run.toml:3: --schedule");
  EXPECT_EQ(choice.expected, "one of auto, dense, packed, phased");
  EXPECT_EQ(choice.remedy, "did you mean phased?");
}

TEST(SetOption, NamesTheNearestOptionForATypingError) {
  Options options;
  EXPECT_EQ(thrown_error<OptionError>([&] { set_option(options, "shedule", "auto"); }).remedy,
            "did you mean --schedule?");
  EXPECT_EQ(thrown_error<OptionError>([&] { set_option(options, "clip_ratio_hihg", "1"); }).remedy,
            "did you mean --clip-ratio-high?");
  EXPECT_EQ(thrown_error<OptionError>([&] { set_option(options, "qqqqqqqq", "1"); }).remedy,
            "espalier VERB --help lists them");
}

TEST(SetOption, ReadsSizesAndRefusesOthers) {
  Options options;
  EXPECT_NO_THROW(set_option(options, "memory-budget", "8GiB"));
  EXPECT_EQ(options.memory_budget, "8GiB");
  for (const char* text : {"0", "0GiB", "8GiBs", "lots", "-1GiB", "99999999999999TiB"})
    EXPECT_THROW(set_option(options, "memory-budget", text), OptionError) << text;
}

TEST(SetOption, AsksForTheUnitOfASize) {
  Options options;
  const auto remedy_of = [&](const char* text) {
    return thrown_error<OptionError>([&] { set_option(options, "memory-budget", text); }).remedy;
  };
  for (const char* text : {"8", "8.5", "999999"})
    EXPECT_EQ(remedy_of(text), std::string("give a unit: ") + text + "GiB, " + text + "MiB");
  EXPECT_EQ(remedy_of("4586000000"), "give a unit: 4586000000B is 4.27 GiB");
  EXPECT_NO_THROW(set_option(options, "memory-budget", "8589934592B"));
}

TEST(SetOption, ReadsOtherSpellingsOfAWord) {
  Options options;
  for (const auto& [given, meant] : {std::pair("bf16", "bfloat16"),
                                     {"fp32", "float32"},
                                     {"fp64", "float64"},
                                     {"torch.bfloat16", "bfloat16"},
                                     {"bfloat16", "bfloat16"}}) {
    set_option(options, "dtype", given);
    EXPECT_EQ(options.dtype, meant) << given;
    set_option(options, "save-dtype", given);
    EXPECT_EQ(options.save_dtype, meant) << given;
  }
  set_option(options, "adv-estimator", "reinforce++");
  EXPECT_EQ(options.adv_estimator, "reinforce_plus_plus");
}

TEST(SetOption, LeadsFromAWordOfOtherTrainersToItsOwn) {
  Options options;
  const auto remedy = [&](const char* name, const char* value) {
    return thrown_error<OptionError>([&] { set_option(options, name, value); }).remedy;
  };
  for (const char* word : {"ppo", "grpo", "dapo", "dr_grpo"})
    EXPECT_NE(remedy("policy-loss", word).find("vanilla"), std::string::npos) << word;
  EXPECT_NE(remedy("dtype", "fp16").find("bfloat16"), std::string::npos);
  EXPECT_NE(remedy("adv-estimator", "ppo").find("gae"), std::string::npos);
}

TEST(Validate, RefusesCombinationsWithoutAMeaning) {
  Options options;
  options.policy_loss = "sapo";
  EXPECT_NO_THROW(validate(options));
  options.loss_agg_mode = "token-mean";
  EXPECT_THROW(validate(options), OptionError);
  options.loss_agg_mode = "seq-mean-token-mean";
  EXPECT_NO_THROW(validate(options));
  options = Options{};
  options.loss_scale_factor = 100;
  EXPECT_THROW(validate(options), OptionError);
  options.loss_agg_mode = "seq-mean-token-sum-norm";
  EXPECT_NO_THROW(validate(options));
  options = Options{};
  options.betas = "0.9";
  EXPECT_THROW(validate(options), OptionError);
}

TEST(ParseNumbers, AllowsSpacesAroundCommas) {
  EXPECT_EQ(parse_numbers("betas", "0.9, 0.999"), (std::vector<double>{0.9, 0.999}));
  EXPECT_EQ(parse_numbers("n", "8"), (std::vector<double>{8}));
}

TEST(NumberText, ReadsBackAsTheSameBits) {
  EXPECT_EQ(number_text(1e-6), "1e-6");
  EXPECT_EQ(number_text(0.2), "0.2");
  EXPECT_EQ(number_text(3), "3");
  for (double value : {1e-6, 0.1, 1.0 / 3, 1e-300, 1.7976931348623157e308, -2.5e-10})
    EXPECT_EQ(parse_number(number_text(value), "", ""), value);
}

TEST(NearestName, CountsASwapAsOneEditAndGivesUpWhenFar) {
  EXPECT_EQ(nearest_name("sehdule", {"schedule", "share"}), "schedule");
  EXPECT_EQ(nearest_name("pm", {"mp", "tpx"}), "mp");
  EXPECT_EQ(nearest_name("zebra", {"model", "rollouts"}), "");
  EXPECT_EQ(nearest_name("x", {"n"}), "");
}

TEST(NearestOption, KnowsTheWordsOfOtherTrainers) {
  std::vector<std::string> names = {"help", "config"};
  for (const OptionRow& row : option_rows()) names.push_back(row.name);
  EXPECT_EQ(nearest_option("lerning-rate", names), "lr");
  EXPECT_EQ(nearest_option("learning_rate", names), "lr");
  EXPECT_EQ(nearest_option("batch-size", names), "mini-batch-size");
  EXPECT_EQ(nearest_option("num_train_epochs", names), "epochs");
  EXPECT_EQ(nearest_option("max-setps", names), "steps");
  EXPECT_EQ(nearest_option("output-dir", names), "out");
  EXPECT_EQ(nearest_option("kl_coef", names), "kl-loss-coef");
  EXPECT_EQ(nearest_option("eps-clip", names), "clip-ratio-low");
  EXPECT_EQ(nearest_option("sehdule", names), "schedule");
  EXPECT_EQ(nearest_option("zebra", names), "");
}

TEST(NearestOption, NamesNoOptionThatIsNotOffered) {
  EXPECT_EQ(nearest_option("learning-rate", {"model", "threads"}), "");
  EXPECT_EQ(nearest_option("model-path", {"model", "threads"}), "model");
}

TEST(OptionsJson, GoesThereAndBackExactly) {
  Options options;
  options.lr = 1.0 / 3;
  options.seed = 9007199254740993;  // not a double
  options.betas = "0.9,0.95";
  options.model = "a \"quoted\" path";
  options.decay_matrices_only = true;
  const Json json = options_to_json(options);
  EXPECT_TRUE(json["lr"].is_number_float());
  EXPECT_TRUE(json["seed"].is_number_integer());
  EXPECT_TRUE(json["decay_matrices_only"].is_boolean());
  EXPECT_EQ(json["betas"], Json::array({0.9, 0.95}));
  EXPECT_EQ(json.size(), option_rows().size());
  const Options back = options_from_json(Json::parse(json.dump()), "run.json");
  for (const OptionRow& row : option_rows()) EXPECT_EQ(option_text(back, row.name), option_text(options, row.name));
}

TEST(OptionsJson, HoldsOnlyWhatTheVerbTakes) {
  const Json json = options_to_json(Options{}, 'i');
  EXPECT_TRUE(json.contains("share"));
  EXPECT_TRUE(json.contains("threads"));
  EXPECT_FALSE(json.contains("lr"));
}

TEST(OptionsJson, NamesTheFileInAnError) {
  EXPECT_EQ(thrown_error<OptionError>([] {
              options_from_json(Json{{"lr", "fast"}}, "run.json");
            }).where,
            "run.json: --lr");
  EXPECT_THROW(options_from_json(Json{{"no_such", 1}}, "run.json"), OptionError);
  EXPECT_THROW(options_from_json(Json{{"lr", Json::object()}}, "run.json"), OptionError);
  EXPECT_THROW(options_from_json(Json::array(), "run.json"), OptionError);
}

}  // namespace
}  // namespace espalier
