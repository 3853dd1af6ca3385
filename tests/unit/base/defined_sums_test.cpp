#include "espalier/base/defined_sums.h"

#include <gtest/gtest.h>

#include "espalier/base/instruction_set.h"
#include "tests/with_products.h"

namespace espalier {
namespace {

TEST(DefinedSums, AreThoseOfTheOptionInEveryDtype) {
  const WithProducts restored(true);
  for (const bool own : {true, false})
    for (const DType chosen : {DType::float64, DType::float32, DType::bfloat16}) {
      choose_defined_sums(own, chosen);
      EXPECT_EQ(defined_sums(), own);
      for (const DType other : {DType::float64, DType::float32, DType::bfloat16}) EXPECT_EQ(defined_sums(other), own);
    }
}

TEST(DefinedSums, AreLeftToTheLibraryOnlyForBfloat16OnTiles) {
  const WithProducts restored(true);
  const std::optional<bool> said = defined_sums_by_environment();
  const bool wide = said.value_or(true), in_bfloat16 = said.value_or(bfloat16_products() != Bfloat16Products::tiles);
  for (const DType chosen : {DType::float64, DType::float32, DType::bfloat16}) {
    choose_defined_sums(std::nullopt, chosen);
    EXPECT_EQ(defined_sums(), chosen == DType::bfloat16 ? in_bfloat16 : wide);
    EXPECT_EQ(defined_sums(DType::float64), wide);
    EXPECT_EQ(defined_sums(DType::float32), wide);
    EXPECT_EQ(defined_sums(DType::bfloat16), in_bfloat16);
  }
}

}  // namespace
}  // namespace espalier
