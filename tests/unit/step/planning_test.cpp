// What cannot fit is refused from the shape alone.
#include "espalier/step/planning.h"

#include <gtest/gtest.h>

#include "espalier/base/error.h"
#include "espalier/plan/memory_model.h"

namespace espalier {
namespace {

ModelShape shape_of_a_gigabyte() {  // of weights in float32: 2^28 in the embedding and the head
  ModelShape shape;
  shape.vocabulary = 1 << 17, shape.hidden = 1 << 10;
  return shape;
}

TEST(RequireRoom, ComparesTheBudgetWithAllThatIsHeld) {
  const ModelShape shape = shape_of_a_gigabyte();
  Options options;
  for (const StepKind& kind : {StepKind{}, StepKind{.optimizer = false},
                               StepKind{.gradients = false, .optimizer = false}, StepKind{.beside_bytes = 1 << 30}}) {
    const std::int64_t held = ActivationBytes(shape, DType::float32, kind).constant();
    options.memory_budget = std::to_string(held);
    EXPECT_NO_THROW(require_room(shape, options, kind));
    options.memory_budget = std::to_string(held - 1);
    EXPECT_THROW(require_room(shape, options, kind), MemoryBudgetError);
  }
}

TEST(RequireRoom, SaysHowMuchIsNeededAndWhatWouldNeedLess) {
  Options options;
  options.memory_budget = "100MiB";
  try {
    require_room(shape_of_a_gigabyte(), options, {.gradients = false, .optimizer = false});
    FAIL() << "100 MiB cannot hold a gigabyte";
  } catch (const MemoryBudgetError& error) {
    EXPECT_EQ(error.exit_code(), 5);
    EXPECT_EQ(error.text().where, "--memory-budget");
    EXPECT_NE(error.text().expected.find(" of weights and "), std::string::npos) << error.what();
    EXPECT_NE(error.text().expected.find("that the process itself takes"), std::string::npos) << error.what();
    EXPECT_NE(error.text().remedy.find("bfloat16"), std::string::npos) << error.what();
  }
}

TEST(RequireRoom, WithoutABudgetAsksWhatIsFree) {
  ModelShape shape = shape_of_a_gigabyte();
  EXPECT_NO_THROW(require_room({}, Options(), {.gradients = false, .optimizer = false}));
  shape.hidden = 1 << 30;  // a thousand terabytes
  EXPECT_THROW(require_room(shape, Options(), {.gradients = false, .optimizer = false}), MemoryBudgetError);
}

}  // namespace
}  // namespace espalier
