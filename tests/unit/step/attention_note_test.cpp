#include "espalier/step/attention_note.h"

#include <gtest/gtest.h>

namespace espalier {
namespace {

ModelShape four_layers() {
  ModelShape shape;
  shape.layers = 4, shape.heads = shape.kv_heads = 1, shape.head_dim = 64;
  return shape;
}

TEST(LayersBesideLibrary, AreThoseWithAWindow) {
  ModelShape shape = four_layers();
  EXPECT_EQ(layers_beside_library(shape, AttentionBy::flash), "");
  shape.window = 128, shape.window_layer = {1, 0, 1, 1};
  EXPECT_EQ(layers_beside_library(shape, AttentionBy::cudnn),
            "3 of 4 layers of attention (windows) run on the own kernels: --attention cudnn does not take them");
  EXPECT_EQ(layers_beside_library(shape, AttentionBy::own), "");
}

TEST(LayersBesideLibrary, AreAllWhereScoresHaveACapOrValuesAnotherSizeOrHeadsDoNotFit) {
  ModelShape capped = four_layers(), latent = four_layers(), narrow = four_layers();
  narrow.head_dim = 36;
  EXPECT_NE(layers_beside_library(narrow, AttentionBy::cudnn).find("(heads of 36 elements)"), std::string::npos);
  capped.attention.soft_cap = 50;
  EXPECT_NE(layers_beside_library(capped, AttentionBy::flash).find("4 of 4 layers of attention (soft caps)"),
            std::string::npos);
  latent.latent.key_value = 16, latent.latent.value = 32;
  EXPECT_NE(layers_beside_library(latent, AttentionBy::flash).find("values of another size"), std::string::npos);
}

}  // namespace
}  // namespace espalier
