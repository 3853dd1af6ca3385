#include "espalier/state/layer_notes.h"
#include "espalier/mixers/delta_rule/shape.h"
#include "espalier/mixers/latent_attention/shape.h"
#include "espalier/ops/cpu/operations.h"
#include "espalier/state/model_state.h"
#include "tests/support/layers.h"
#include "tests/unit/plan/shapes.h"

#include <gtest/gtest.h>

namespace espalier {
namespace {

ModelShape four_layers(std::int64_t head_dim = 64) {
  ModelShape shape;
  shape.layer = attention_layers(4, {.heads = 1, .kv_heads = 1, .head_dim = head_dim}, 0);
  return shape;
}

TEST(LayersBesideLibrary, AreThoseWithAWindow) {
  ModelShape shape = four_layers();
  EXPECT_EQ(layers_beside_library(shape, AttentionKernels::flash), "");
  testing::change_attention(shape, [](AttentionShape& a, std::size_t layer) { a.window = layer == 1 ? 0 : 128; });
  EXPECT_EQ(layers_beside_library(shape, AttentionKernels::cudnn),
            "3 of 4 layers of attention (windows) run on the own kernels: --attention cudnn does not take them");
  EXPECT_EQ(layers_beside_library(shape, AttentionKernels::own), "");
}

TEST(LayersBesideLibrary, AreAllWhereScoresHaveACapOrValuesAnotherSizeOrHeadsDoNotFit) {
  ModelShape capped = four_layers(), latent = four_layers(), narrow = four_layers(36);
  EXPECT_NE(layers_beside_library(narrow, AttentionKernels::cudnn).find("(heads of 36 elements)"), std::string::npos);
  const ModelShape wide = four_layers(256);
  EXPECT_EQ(layers_beside_library(wide, AttentionKernels::cudnn, 90), "");
  EXPECT_NE(layers_beside_library(wide, AttentionKernels::cudnn, 100).find("(heads of 256 elements)"),
            std::string::npos);
  testing::change_attention(capped, [](AttentionShape& a, std::size_t) { a.soft_cap = 50; });
  EXPECT_NE(layers_beside_library(capped, AttentionKernels::flash).find("4 of 4 layers of attention (soft caps)"),
            std::string::npos);
  for (LayerShape& layer : latent.layer)
    layer.mixer = std::make_shared<const LatentAttention>(
        LatentShape{.heads = 1, .key_value = 16, .plain = 32, .rotary = 32, .value = 32});
  EXPECT_NE(layers_beside_library(latent, AttentionKernels::flash).find("values of another size"), std::string::npos);
}

int trials = 0;
std::string found;  // by a trial

const std::string& try_chunks() {
  ++trials;
  return found;
}

TEST(LayersWithoutChunks, AreTriedForRecurrentOnesInBfloat16Alone) {
  ModelShape shape = four_layers();
  trials = 0, found = "states differ";
  EXPECT_EQ(layers_without_chunks(shape, DType::bfloat16, try_chunks), "");
  RecurrenceShape recurrence;
  recurrence.key_heads = recurrence.value_heads = recurrence.key_dim = recurrence.value_dim = recurrence.kernel = 2;
  shape.layer[1].mixer = std::make_shared<const DeltaRule>(recurrence);
  EXPECT_EQ(layers_without_chunks(shape, DType::float32, try_chunks), "");
  EXPECT_EQ(layers_without_chunks(shape, DType::bfloat16, nullptr), "") << "a CPU";
  RecurrenceShape wide = recurrence;
  wide.key_dim = 256;
  ModelShape too_wide = four_layers();
  too_wide.layer[1].mixer = std::make_shared<const DeltaRule>(wide);
  EXPECT_EQ(layers_without_chunks(too_wide, DType::bfloat16, try_chunks), "");
  EXPECT_EQ(trials, 0);
  EXPECT_NE(layers_without_chunks(shape, DType::bfloat16, try_chunks).find("row by row"), std::string::npos);
  EXPECT_EQ(trials, 1);
  found = "";
  EXPECT_EQ(layers_without_chunks(shape, DType::bfloat16, try_chunks), "");
  EXPECT_EQ(trials, 2);
}

// A model with drawn weights has no progress to note it to, but needs the trial, too.
TEST(LayersWithoutChunks, AreTriedWhereAModelIsMade) {
  ModelShape shape = testing::tiny_shape();
  RecurrenceShape recurrence;
  recurrence.key_heads = recurrence.value_heads = 2, recurrence.key_dim = recurrence.value_dim = 16;
  recurrence.kernel = 4;
  shape.layer[1].mixer = std::make_shared<const DeltaRule>(recurrence);
  Operations counting = cpu::operations();
  counting.without_chunks = try_chunks;
  const std::unique_ptr<Device> device = cpu::device_with(counting);
  trials = 0, found = "states differ";
  const ModelState model(LocalShape(shape, {}, {}), DType::bfloat16, *device);
  EXPECT_EQ(trials, 1);
  EXPECT_NE(model.row_by_row.find("states differ"), std::string::npos);
}

}  // namespace
}  // namespace espalier
