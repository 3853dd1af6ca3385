// A path counts what is added to the gradients of its trunks, and tells too few and too many.
#include "espalier/model/open_path.h"

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include "espalier/base/error.h"
#include "espalier/mixers/attention/shape.h"
#include "espalier/model/path_guest.h"

namespace espalier {
namespace {

ModelShape small_shape() {
  ModelShape shape;
  shape.hidden = 8, shape.layer = attention_layers(2, {.heads = 2, .kv_heads = 1, .head_dim = 4}, 0);
  return shape;
}

class Path : public ::testing::Test {
 protected:
  Arena arena_{1 << 20, cpu_device()};
  ArenaScope scope_{arena_};
  OpenPath path_{small_shape(), 10, at::kDouble, true, arena_};
};

TEST_F(Path, IsAStackOfRows) {
  path_.push(4, 0);
  path_.top(0).k.fill_(1);
  path_.push(3, 0);
  EXPECT_EQ(path_.rows(), 7);
  path_.top(0).k.fill_(2);
  EXPECT_EQ(path_.path(0, 7).k.sum().item<double>(), 4 * 4 + 3 * 4 * 2);
  EXPECT_EQ(path_.top(0).k.size(0), 3);
  path_.pop();
  EXPECT_EQ(path_.rows(), 4);
  EXPECT_EQ(path_.top(0).k.sum().item<double>(), 16);
  EXPECT_THROW(path_.push(7, 0), InternalError) << "more rows than it was made for";
}

TEST_F(Path, GradientsOfATrunkBeginAtZero) {
  path_.push(4, 0);
  path_.top(1).grad_v.fill_(7);
  path_.pop();
  path_.push(5, 0);
  EXPECT_EQ(path_.top(1).grad_v.abs().sum().item<double>(), 0);
}

// Every set of rows below a trunk adds to it once a layer, whether it stands right below it or further down.
TEST_F(Path, AGradientIsReadAfterTheLastContributionAndNotBefore) {
  path_.push(4, 2);
  path_.push(3, 1);
  path_.count_contribution(0, 7);  // a wave below both
  EXPECT_NO_THROW(path_.expect_complete(0));
  EXPECT_THROW(path_.expect_complete(1), InternalError) << "counted by layer";
  path_.pop();
  EXPECT_THROW(path_.expect_complete(0), InternalError) << "one of two";
  path_.count_contribution(0, 4);
  EXPECT_NO_THROW(path_.expect_complete(0));
  EXPECT_THROW(path_.count_contribution(0, 4), InternalError) << "more than the plan promises";
}

// A rank without rows of a wave that others run adds nothing, and counts it.
TEST_F(Path, AJoinedWaveCounts) {
  path_.push(4, 1);
  JoinedPath joined(path_);
  joined.enter({Stop::Kind::layer, Pass::forward, 1});
  EXPECT_THROW(path_.expect_complete(1), InternalError);
  joined.enter({Stop::Kind::layer, Pass::backward, 1});
  joined.leave({Stop::Kind::layer, Pass::backward, 1});
  EXPECT_NO_THROW(path_.expect_complete(1));
  joined.enter({Stop::Kind::final_norm, Pass::backward, -2});
  EXPECT_EQ(path_.top(1).grad_k.abs().sum().item<double>(), 0);
}

}  // namespace
}  // namespace espalier
