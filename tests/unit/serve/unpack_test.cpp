// Decompression with a limit.
#include "espalier/serve/unpack.h"

#include <gtest/gtest.h>
#include <zstd.h>

#include "espalier/base/error.h"

namespace espalier::serve {
namespace {

constexpr std::int64_t kMost = 1 << 20;

std::string unpacked(const std::string& body, std::string_view encoding, std::int64_t most = kMost) {
  std::string room;
  return std::string(unpack(body, encoding, most, room));
}

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
      EXPECT_EQ(unpacked(packed(repeated(size), states_size), "zstd"), repeated(size)) << size;
  EXPECT_EQ(unpacked("as it is", ""), "as it is");
  EXPECT_EQ(unpacked("as it is", "identity"), "as it is");
  EXPECT_EQ(unpacked(packed("one frame, ") + packed("and another"), "zstd"), "one frame, and another");
}

TEST(Unpack, MoreThanTheLimitIsRefused) {
  for (const bool states_size : {true, false})
    EXPECT_THROW(unpacked(packed(repeated(kMost + 1), states_size), "zstd"), InputError) << states_size;
  EXPECT_THROW(unpacked(packed(repeated(kMost)) + packed("x"), "zstd"), InputError);
  EXPECT_THROW(unpacked(std::string(kMost + 1, 'x'), ""), InputError);
}

TEST(Unpack, DamagedDataAreRefused) {
  const std::string whole = packed(repeated(5000));
  for (std::size_t end = 0; end < whole.size(); end += 3)
    EXPECT_THROW(unpacked(whole.substr(0, end), "zstd"), InputError) << end;
  EXPECT_THROW(unpacked("no zstd at all", "zstd"), InputError);
  EXPECT_THROW(unpacked("x", "br"), UnsupportedError);
}

}  // namespace
}  // namespace espalier::serve
