// Paths of checkpoints: nothing that a client names can leave its folder.
#include "espalier/serve/names.h"

#include <gtest/gtest.h>

#include "espalier/base/error.h"

namespace espalier::serve {
namespace {

TEST(Names, PathsAreReadAndWritten) {
  for (const std::string path : {"tinker://s12:train:0/weights/a", "tinker://s12:train:0/sampler_weights/a.b-c_D9",
                                 "tinker://s/external_weights/0"})
    EXPECT_EQ(checkpoint_name(path).path(), path);
  EXPECT_EQ(checkpoint_name("tinker://r/weights/x").id(), "weights/x");
  EXPECT_EQ(checkpoint_name("tinker://r/weights/x").kind, CheckpointKind::training);
}

TEST(Names, OtherFormsAreRefused) {
  for (const std::string path :
       {"", "tinker://", "tinker://r/weights", "tinker://r/weights/", "tinker://r//x", "tinker:///weights/x",
        "tinker://r/weights/a/b", "tinker://r/other/x", "tinker://../weights/x", "tinker://r/weights/..",
        "tinker://r/weights/.", "tinker://./weights/x", "http://r/weights/x", "tinker://r/weights/a b",
        "tinker://r/weights/a\n", "tinker://r/weights/\xc3\xa4"})
    EXPECT_THROW(checkpoint_name(path), InputError) << path;
  EXPECT_THROW(checkpoint_name("tinker://r/weights/" + std::string(129, 'x')), InputError);
  EXPECT_THROW(checkpoint_name("r", "weights", std::string("a\0b", 3)), InputError);
}

TEST(Names, PlainNames) {
  require_plain_name("step-000010", "path");
  for (const std::string name : {"", ".", "..", "a/b", "a b", "a:b"})
    EXPECT_THROW(require_plain_name(name, "path"), InputError) << name;
}

}  // namespace
}  // namespace espalier::serve
