// ESPALIER_INSTRUCTION_SET: its names, what the processor lacks, and that both choices follow it.
#include "espalier/base/instruction_set.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "espalier/base/error.h"

namespace espalier {
namespace {

TEST(InstructionLevels, ThoseOfTheProcessorAreFoundByName) {
  for (const InstructionLevel& level : kInstructionLevels) {
    if (processor_has(level)) {
      EXPECT_EQ(&instruction_level(level.name), &level);
      EXPECT_NE((", " + instruction_levels() + ",").find(std::string(" ") + level.name + ","), std::string::npos);
    } else {
      EXPECT_THROW(instruction_level(level.name), OptionError) << level.name;
    }
  }
  EXPECT_TRUE(processor_has(kInstructionLevels[0]));
}

TEST(InstructionLevels, AnUnknownOneIsAnErrorThatNamesWhatTheProcessorHas) {
  for (const char* name : {"avx", "AVX2", "avx2 ", "sse9"}) {
    try {
      instruction_level(name);
      FAIL() << name << " was taken";
    } catch (const OptionError& error) {
      EXPECT_EQ(error.text().where, "ESPALIER_INSTRUCTION_SET");
      EXPECT_NE(error.text().expected.find(instruction_levels()), std::string::npos);
      EXPECT_EQ(error.text().got, name);
    }
  }
}

// Under tools/run_tests.py this runs once without the variable and once with each level that the processor has.
TEST(InstructionLevels, Float32AndBfloat16FollowTheVariable) {
  const char* name = std::getenv("ESPALIER_INSTRUCTION_SET");
  const InstructionLevel& level = name && *name ? instruction_level(name) : instruction_level();
  EXPECT_EQ(&instruction_level(), &level);
  EXPECT_EQ(instruction_set(), level.set);
  EXPECT_EQ(bfloat16_products(), level.products);
  if (name && *name) return;
  for (const InstructionLevel& wider : kInstructionLevels) {
    if (&wider <= &level || !processor_has(wider)) continue;
    ADD_FAILURE() << level.name << " was chosen, the processor has " << wider.name;
  }
  EXPECT_NE(level.products, Bfloat16Products::emulated_tiles);
}

}  // namespace
}  // namespace espalier
