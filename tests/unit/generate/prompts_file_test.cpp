// Files of prompts: what is read, and what is refused with its place.
#include "espalier/generate/prompts_file.h"

#include <gtest/gtest.h>

#include "espalier/base/error.h"

namespace espalier {
namespace {

LazyTokenizer no_tokenizer("/no/such/model");

TEST(PromptsFile, ReadsIdsGroupAndWhatIsCarried) {
  const PromptFile file = parse_prompts(
      "{\"prompt_ids\": [1, 2], \"group\": \"a\", \"id\": 7, \"meta\": {\"x\": null}, \"answer\": \"4\"}\n\n"
      "{\"group\": 3, \"prompt_ids\": [0]}",
      "p.jsonl", 10, no_tokenizer);
  ASSERT_EQ(file.prompts.size(), 2u);
  EXPECT_EQ(file.prompts[0].ids, (std::vector<std::int32_t>{1, 2}));
  EXPECT_EQ(file.prompts[0].group, "\"a\"");
  EXPECT_EQ(file.prompts[0].carried, R"({"id":7,"meta":{"x": null},"answer":"4"})");
  EXPECT_EQ(file.prompts[1].group, "3");
  EXPECT_EQ(file.prompts[1].carried, "");
  EXPECT_EQ(file.prompts[1].where, "p.jsonl:3");
  ASSERT_EQ(file.notes.size(), 1u);
  EXPECT_NE(file.notes[0].find("\"answer\""), std::string::npos);
}

struct Bad {
  const char* text;
  const char* where;
};

TEST(PromptsFile, RefusesBadRecordsByLineAndField) {
  const Bad cases[] = {
      {"{\"prompt_ids\": [1]}\n{\"prompt_ids\": [10]}", "p.jsonl:2: prompt_ids[0]"},
      {"{\"prompt_ids\": [-1]}", "p.jsonl:1: prompt_ids[0]"},
      {"{\"prompt_ids\": [1.5]}", "p.jsonl:1: prompt_ids[0]"},
      {"{\"prompt_ids\": \"text\"}", "p.jsonl:1: prompt_ids"},
      {"{\"prompt_ids\": []}", "p.jsonl:1: prompt_ids"},
      {"{\"id\": 1}", "p.jsonl:1: prompt"},
      {"{\"prompt\": null}", "p.jsonl:1: prompt"},
      {"{\"prompt\": 3}", "p.jsonl:1: prompt"},
      {"{\"prompt\": {\"role\": \"user\"}}", "p.jsonl:1: prompt"},
      {"{\"prompt\": [ ]}", "p.jsonl:1: prompt"},
      {"{\"prompt_ids\": [1], \"extra_info\": 3}", "p.jsonl:1: extra_info"},
      {"{\"prompt_ids\": [1], \"reward_model\": \"x\"}", "p.jsonl:1: reward_model"},
      {"{\"prompt_ids\": [1], \"data_source\": 3}", "p.jsonl:1: data_source"},
      {"{\"prompt_ids\": [1], \"response\": \"x\"}", "p.jsonl:1: response"},
      {"{\"prompt_ids\": [1], \"prompt_ids\": [2]}", "p.jsonl:1: prompt_ids"},
      {"{\"prompt_ids\": [1], \"group\": [1]}", "p.jsonl:1: group"},
      {"{\"prompt_ids\": [1], \"response_ids\": [2]}", "p.jsonl:1: response_ids"},
      {"{\"prompt_ids\": [1], \"meta\": NaN}", "p.jsonl:1: meta"},
      {"{\"prompt_ids\": [1], \"group\": 1}\n{\"prompt_ids\": [1]}", "p.jsonl:2: group"},
      {"[1, 2]", "p.jsonl:1"},
      {"{\"prompt_ids\": [1]", "p.jsonl:1"},
      {"\n \n", "p.jsonl"},
      {"", "p.jsonl"},
  };
  for (const Bad& bad : cases) {
    try {
      parse_prompts(bad.text, "p.jsonl", 10, no_tokenizer);
      ADD_FAILURE() << bad.text;
    } catch (const InputError& error) {
      EXPECT_EQ(error.text().where, bad.where) << bad.text;
    }
  }
}

}  // namespace
}  // namespace espalier
