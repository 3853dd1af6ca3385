// Decompression with a limit.
#include "espalier/serve/unpack.h"

#include <gtest/gtest.h>
#include <zstd.h>

#include "espalier/base/error.h"

namespace espalier::serve {
namespace {

constexpr std::int64_t kMost = 1 << 20;

std::string packed(const std::string& text, bool states_size = true) {
  ZSTD_CCtx* const context = ZSTD_createCCtx();
  ZSTD_CCtx_setParameter(context, ZSTD_c_contentSizeFlag, states_size ? 1 : 0);
  std::string out(ZSTD_compressBound(text.size()), '\0');
  out.resize(ZSTD_compress2(context, out.data(), out.size(), text.data(), text.size()));
  ZSTD_freeCCtx(context);
  return out;
}

std::string repeated(std::size_t size) {
  std::string out;
  while (out.size() < size) out += "a prompt that repeats, " + std::to_string(out.size() % 7);
  return out.substr(0, size);
}

TEST(Unpack, GivesBackWhatWasPacked) {
  for (const std::size_t size : {0, 1, 1000, 1 << 18, 1 << 20})
    for (const bool states_size : {true, false})
      EXPECT_EQ(unpack(packed(repeated(size), states_size), "zstd", kMost), repeated(size)) << size;
  EXPECT_EQ(unpack("as it is", "", kMost), "as it is");
  EXPECT_EQ(unpack("as it is", "identity", kMost), "as it is");
  EXPECT_EQ(unpack(packed("one frame, ") + packed("and another"), "zstd", kMost), "one frame, and another");
}

TEST(Unpack, MoreThanTheLimitIsRefused) {
  for (const bool states_size : {true, false})
    EXPECT_THROW(unpack(packed(repeated(kMost + 1), states_size), "zstd", kMost), InputError) << states_size;
  EXPECT_THROW(unpack(packed(repeated(kMost)) + packed("x"), "zstd", kMost), InputError);
  EXPECT_THROW(unpack(std::string(kMost + 1, 'x'), "", kMost), InputError);
}

TEST(Unpack, DamagedDataAreRefused) {
  const std::string whole = packed(repeated(5000));
  for (std::size_t end = 0; end < whole.size(); end += 3)
    EXPECT_THROW(unpack(whole.substr(0, end), "zstd", kMost), InputError) << end;
  EXPECT_THROW(unpack("no zstd at all", "zstd", kMost), InputError);
  EXPECT_THROW(unpack("x", "br", kMost), UnsupportedError);
}

}  // namespace
}  // namespace espalier::serve
