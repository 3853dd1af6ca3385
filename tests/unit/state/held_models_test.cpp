// Models that cannot fit are refused from the shape alone.
#include "espalier/state/held_models.h"

#include <gtest/gtest.h>

#include <vector>

#include "espalier/base/error.h"
#include "espalier/forecast/memory_model.h"

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
  const HeldModel trained{shape, {}}, gradients{shape, {.optimizer = false}}, weights{shape};
  const std::int64_t process = ActivationBytes(ModelShape{}, DType::float32, kForwardOnly).constant();
  const std::int64_t one = 4 * shape.parameters();
  EXPECT_EQ(weights.bytes(DType::float32), one);
  for (const auto& [held, models] : {std::pair(std::vector{trained}, 4 * one),
                                     {{gradients}, 2 * one},
                                     {{weights}, one},
                                     {{trained, weights, trained}, 9 * one},
                                     {{weights, gradients}, 3 * one}}) {
    EXPECT_EQ(bytes_held(held, DType::float32), process + models);
    EXPECT_EQ(bytes_beside(held.front(), held, DType::float32), models - held.front().bytes(DType::float32));
    options.memory_budget = std::to_string(process + models);
    EXPECT_NO_THROW(require_room(held, options));
    options.memory_budget = std::to_string(process + models - 1);
    EXPECT_THROW(require_room(held, options), MemoryBudgetError);
  }
}

TEST(RequireRoom, SaysHowMuchIsNeededAndWhatWouldNeedLess) {
  Options options;
  options.memory_budget = "100MiB";
  try {
    require_room(std::vector{HeldModel{shape_of_a_gigabyte()}}, options);
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
  EXPECT_NO_THROW(require_room(std::vector{HeldModel{}}, Options()));
  shape.hidden = 1 << 30;  // a thousand terabytes
  EXPECT_THROW(require_room(std::vector{HeldModel{shape}}, Options()), MemoryBudgetError);
}

}  // namespace
}  // namespace espalier
