// Damaged and malicious safetensors files: refused with an InputError, or consistent down to the last byte.
#include <random>

#include "espalier/checkpoint/safetensors.h"
#include "tests/unit/checkpoint/small_model.h"

namespace espalier::test {
namespace {

const std::string kHeader = R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},)"
                            R"("b":{"dtype":"BF16","shape":[3],"data_offsets":[8,14]}})";
const std::string kData = "0123456789abcd";

struct HostileSafetensors : ::testing::Test {
  TemporaryDirectory folder;

  std::string error(const std::string& content) const {
    write_text(folder / "x.safetensors", content);
    return message_of<InputError>([&] { SafetensorsFile file(folder / "x.safetensors"); });
  }
  std::string header_error(const std::string& header, const std::string& data = kData) const {
    return error(raw_safetensors(header, data));
  }
  // Opens the content; touches every byte of every tensor (an invalid address would fault). True when accepted.
  bool opens(const std::string& content) const {
    write_text(folder / "x.safetensors", content);
    try {
      const SafetensorsFile file(folder / "x.safetensors");
      std::int64_t bytes = 0;
      unsigned sum = 0;
      for (const SafetensorsEntry& entry : file.entries()) {
        bytes += entry.bytes;
        for (std::int64_t i = 0; i < entry.bytes; ++i) sum += std::to_integer<unsigned>(entry.data[i]);
      }
      EXPECT_LT(sum, 1u << 30);
      EXPECT_LT(bytes, static_cast<std::int64_t>(content.size()));
      return true;
    } catch (const InputError&) {
      return false;
    }
  }
};

TEST_F(HostileSafetensors, EveryTruncationIsRefused) {
  const std::string whole = raw_safetensors(kHeader, kData);
  ASSERT_TRUE(opens(whole));
  for (std::size_t length = 0; length < whole.size(); ++length) {
    SCOPED_TRACE(length);
    error(whole.substr(0, length));
  }
  EXPECT_HOLDS(error(whole.substr(0, whole.size() - 1)), "x.safetensors: tensor 'b': expected data up to byte 14");
  EXPECT_HOLDS(error(whole.substr(0, 40)), "a header of");
  EXPECT_HOLDS(error(whole + "x"), "more than the header names");
}

TEST_F(HostileSafetensors, EveryFlippedBitIsRefusedOrHarmless) {
  const std::string whole = raw_safetensors(kHeader, kData);
  const std::size_t end = 8 + kHeader.size();
  int accepted = 0, refused = 0;
  for (std::size_t byte = 0; byte < end; ++byte)
    for (int bit = 0; bit < 8; ++bit) {
      std::string damaged = whole;
      damaged[byte] = static_cast<char>(damaged[byte] ^ (1 << bit));
      ++(opens(damaged) ? accepted : refused);
    }
  // Changes that remain valid: other letters in names and metadata, and [2,1] read as [2,1] of another 4-byte type.
  EXPECT_GT(refused, 10 * accepted) << accepted << " accepted";
}

TEST_F(HostileSafetensors, RandomDamageNeverEscapes) {
  constexpr unsigned kSeed = 4;
  SCOPED_TRACE(text_of("seed ", kSeed));
  std::mt19937 random(kSeed);
  const std::string whole = raw_safetensors(kHeader, kData), letters = "{}[]\",:0123456789-e.\\u\0 \xff";
  for (int round = 0; round < 3000; ++round) {
    std::string damaged = whole;
    for (unsigned changes = 1 + random() % 4; changes > 0; --changes) {
      const std::size_t place = random() % damaged.size();
      if (random() % 3 == 0)
        damaged.erase(place, 1 + random() % 9);
      else if (random() % 2 == 0)
        damaged.insert(place, 1, letters[random() % letters.size()]);
      else
        damaged[place] = letters[random() % letters.size()];
      if (damaged.empty()) damaged = whole;
    }
    opens(damaged);
  }
}

TEST_F(HostileSafetensors, AbsurdHeaderSizesAreRefused) {
  for (const std::uint64_t length : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{1} << 31, std::uint64_t{1} << 63,
                                     ~std::uint64_t{0}, ~std::uint64_t{0} - 7, std::uint64_t{100'000'001}}) {
    std::string content = raw_safetensors(kHeader, kData);
    std::memcpy(content.data(), &length, 8);
    EXPECT_HOLDS(error(content), "expected a header of") << length;
  }
}

TEST_F(HostileSafetensors, OverlapsAndHolesAreRefused) {
  const auto with = [](const std::string& a, const std::string& b) {
    return R"({"a":{"dtype":"U8","shape":[8],"data_offsets":)" + a +
           R"(},"b":{"dtype":"U8","shape":[6],"data_offsets":)" + b + "}}";
  };
  EXPECT_TRUE(opens(raw_safetensors(with("[6,14]", "[0,6]"), kData)));
  EXPECT_HOLDS(header_error(with("[0,8]", "[7,13]")), "(they overlap)");
  EXPECT_HOLDS(header_error(with("[0,8]", "[0,6]")), "(they overlap)");
  EXPECT_HOLDS(header_error(with("[0,8]", "[9,15]")), "(a hole)");
  EXPECT_HOLDS(header_error(with("[1,9]", "[9,15]")), "(a hole)");
  EXPECT_HOLDS(header_error(with("[0,8]", "[14,8]")), "an end before the beginning");
  EXPECT_HOLDS(header_error(with("[0,8]", "[8,15]")), "expected 6 bytes for U8 [6], got data_offsets that span 7");
  EXPECT_HOLDS(header_error(with("[0,8]", "[18446744073709551610,18446744073709551616]")), "tensor 'b'");
  EXPECT_HOLDS(header_error(with("[0,8]", "[18446744073709551609,18446744073709551615]")), "(a hole)");
}

TEST_F(HostileSafetensors, WrongMembersAreNamed) {
  const auto tensor = [](const std::string& members) { return "{\"a\":{" + members + "}}"; };
  const std::string type = R"("dtype":"U8")", shape = R"("shape":[14])", offsets = R"("data_offsets":[0,14])";
  EXPECT_TRUE(opens(raw_safetensors(tensor(type + "," + shape + "," + offsets), kData)));
  for (const auto& [members, text] : {std::pair<std::string, std::string>{type + "," + shape, "2 of them"},
                                      {type + "," + type + "," + shape + "," + offsets, "'dtype' twice"},
                                      {type + "," + shape + "," + offsets + R"(,"more":1)", "'more'"},
                                      {R"("dtype":"Q4_K",)" + shape + "," + offsets, "'Q4_K'"},
                                      {R"("dtype":7,)" + shape + "," + offsets, "the number 7"},
                                      {R"("dtype":["U8"],)" + shape + "," + offsets, "an array"},
                                      {type + R"(,"shape":[-14],)" + offsets, "the number -14"},
                                      {type + R"(,"shape":[-2,-7],)" + offsets, "the number -2"},
                                      {type + R"(,"shape":[14.0],)" + offsets, "the number 14.0"},
                                      {type + R"(,"shape":[1e1],)" + offsets, "the number 1e1"},
                                      {type + R"(,"shape":["14"],)" + offsets, "the text '14'"},
                                      {type + R"(,"shape":[[14]],)" + offsets, "an array"},
                                      {type + R"(,"shape":[null],)" + offsets, "null"},
                                      {type + R"(,"shape":14,)" + offsets, "the number 14"},
                                      {type + R"(,"shape":{},)" + offsets, "an object"},
                                      {type + R"(,"shape":[9223372036854775808],)" + offsets, "9223372036854775808"},
                                      {type + R"(,"shape":[4294967296,4294967296],)" + offsets, "can be counted"},
                                      {R"("dtype":"F64","shape":[2305843009213693952],)" + offsets, "can be counted"},
                                      {type + "," + shape + R"(,"data_offsets":[0])", "1 numbers"},
                                      {type + "," + shape + R"(,"data_offsets":[0,7,14])", "3 numbers"}}) {
    EXPECT_HOLDS(header_error(tensor(members)), text);
    EXPECT_HOLDS(header_error(tensor(members)), "tensor 'a'");
  }
}

TEST_F(HostileSafetensors, WrongHeadersAreNamed) {
  EXPECT_HOLDS(header_error("[]"), "another first character");
  EXPECT_HOLDS(header_error(" {}"), "another first character");
  EXPECT_HOLDS(header_error("{\"a\":1}"), "the number 1");
  EXPECT_HOLDS(header_error("{\"a\":[]}"), "an array");
  EXPECT_HOLDS(header_error("{} {}"), "no valid JSON at byte");
  EXPECT_HOLDS(header_error("{\"a\xff\":{}}"), "no valid JSON at byte");
  EXPECT_HOLDS(header_error("{\"__metadata__\":{\"format\":7}}"), "the number 7");
  EXPECT_HOLDS(header_error("{\"__metadata__\":\"pt\"}"), "the text 'pt'");
  EXPECT_HOLDS(header_error("{\"__metadata__\":{},\"__metadata__\":{}}"), "this name twice");
  const std::string tensor = R"("a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
  EXPECT_HOLDS(header_error("{" + tensor + "," + tensor + "}", ""), "this name twice");
}

TEST_F(HostileSafetensors, DeepJsonIsRefusedWithoutDepth) {
  const std::string deep(2'000'000, '[');
  EXPECT_HOLDS(header_error("{\"a\":" + deep), "an array");
  EXPECT_HOLDS(header_error("{\"a\":{\"shape\":" + deep), "an array");
  std::string objects;
  for (int i = 0; i < 300'000; ++i) objects += "{\"a\":";
  EXPECT_HOLDS(header_error(objects), "expected the members dtype, shape and data_offsets, got 'a'");
  EXPECT_HOLDS(header_error(R"({"a":{"dtype":{"dtype":{)"), "an object");
}

TEST_F(HostileSafetensors, LongAndUglyNamesAreCutInMessages) {
  const std::string text = header_error("{\"" + std::string(1'000'000, 'n') + "\\n\\u0000\":1}");
  EXPECT_LT(text.size(), 1000u);
  EXPECT_HOLDS(header_error(R"({"a\n\u0001b":1})"), "tensor 'a??b'");
}

TEST_F(HostileSafetensors, OtherThingsThanFilesAreRefused) {
  EXPECT_HOLDS(error("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n"), "git lfs pull");
  const auto open = [](const std::filesystem::path& path) {
    return message_of<InputError>([&] { SafetensorsFile file(path); });
  };
  EXPECT_HOLDS(open(folder.path()), "got another kind of file");
  EXPECT_HOLDS(open("/dev/zero"), "got another kind of file");
  EXPECT_HOLDS(open(folder / "none"), "No such file or directory");
}

}  // namespace
}  // namespace espalier::test
