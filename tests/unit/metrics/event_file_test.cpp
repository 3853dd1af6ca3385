// Reads back what EventFile writes with a decoder of its own: records, CRCs bit by bit, Protocol Buffers by wire type.
#include "espalier/metrics/event_file.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <sstream>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/base/json.h"
#include "espalier/metrics/metric_tags.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;

// Division of polynomials over GF(2), one bit of the message at a time.
std::uint32_t slow_crc(const std::string& bytes) {
  std::uint32_t crc = 0xffffffff;
  for (const unsigned char byte : bytes)
    for (int bit = 0; bit < 8; ++bit) {
      const bool carry = ((crc & 1) != 0) != ((byte >> bit & 1) != 0);
      crc >>= 1;
      if (carry) crc ^= 0x82f63b78;
    }
  return crc ^ 0xffffffff;
}

std::uint32_t slow_masked(const std::string& bytes) {
  const std::uint64_t crc = slow_crc(bytes);
  return static_cast<std::uint32_t>(((crc / 32768) + (crc * 131072) + 0xa282ead8ull) & 0xffffffff);
}

template <class T>
T number_at(const std::string& bytes, std::size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof value);  // the test runs on little-endian machines only
  return value;
}

using Fields = std::multimap<int, std::string>;  // number -> raw value (a varint as 8 bytes)

Fields fields_of(const std::string& message) {
  Fields out;
  std::size_t at = 0;
  const auto varint = [&] {
    std::uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
      const auto byte = static_cast<unsigned char>(message.at(at++));
      value |= static_cast<std::uint64_t>(byte & 127) << shift;
      if (byte < 128) return value;
    }
  };
  while (at < message.size()) {
    const std::uint64_t key = varint();
    std::string value;
    std::size_t size = 0;
    switch (key % 8) {
      case 0: {
        const std::uint64_t number = varint();
        value.assign(reinterpret_cast<const char*>(&number), 8);
        break;
      }
      case 1:
        size = 8;
        break;
      case 2:
        size = varint();
        break;
      case 5:
        size = 4;
        break;
      default:
        ADD_FAILURE() << "wire type " << key % 8;
    }
    if (value.empty()) {
      value = message.substr(at, size);
      EXPECT_EQ(value.size(), size);
      at += size;
    }
    out.emplace(static_cast<int>(key / 8), value);
  }
  return out;
}

class EventFolder : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("espalier_events_" + std::to_string(getpid()));
    fs::remove_all(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  static std::vector<Fields> events_of(const fs::path& path) {
    std::ostringstream read;
    read << std::ifstream(path, std::ios::binary).rdbuf();
    const std::string bytes = read.str();
    std::vector<Fields> out;
    for (std::size_t at = 0; at < bytes.size();) {
      const auto length = number_at<std::uint64_t>(bytes, at);
      EXPECT_EQ(number_at<std::uint32_t>(bytes, at + 8), slow_masked(bytes.substr(at, 8)));
      const std::string event = bytes.substr(at + 12, length);
      EXPECT_EQ(number_at<std::uint32_t>(bytes, at + 12 + length), slow_masked(event));
      out.push_back(fields_of(event));
      at += 16 + length;
    }
    return out;
  }
  static std::string only(const Fields& fields, int number) {
    EXPECT_EQ(fields.count(number), 1u) << "field " << number;
    return fields.count(number) ? fields.find(number)->second : std::string(8, '\0');
  }

  fs::path folder_;
};

TEST(Crc32c, EqualsThePublishedCheckValue) {
  EXPECT_EQ(crc32c("123456789"), 0xe3069283u);  // RFC 3720, appendix B.4, gives this polynomial's values
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43u);
  EXPECT_EQ(crc32c(""), 0u);
}

TEST_F(EventFolder, AFileOpensWithItsVersionAndTheStartOfASession) {
  const EventFile file(folder_ / "deep" / "run", 41);
  const std::vector<Fields> events = events_of(file.path());  // on disk without a flush
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(only(events[0], 3), "brain.Event:2");
  EXPECT_EQ(number_at<std::int64_t>(only(events[1], 2), 0), 41);
  EXPECT_EQ(number_at<std::int64_t>(only(fields_of(only(events[1], 7)), 1), 0), 1);  // SessionLog.START
}

TEST_F(EventFolder, ScalarsComeBackWithTagStepTimeAndValue) {
  EventFile file(folder_);
  const std::vector<double> values = {0.25, -1e30, 1e-300, std::numeric_limits<double>::quiet_NaN(), 3.3e7};
  const std::vector<std::int64_t> steps = {0, 127, 128, 300, 1ll << 40};
  for (std::size_t i = 0; i < values.size(); ++i) file.scalar("actor/pg_loss", steps[i], values[i]);
  file.flush();
  const std::vector<Fields> events = events_of(file.path());
  ASSERT_EQ(events.size(), 2 + values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    const Fields& event = events[2 + i];
    EXPECT_GT(number_at<double>(only(event, 1), 0), 1.7e9);  // a time after 2023
    EXPECT_EQ(number_at<std::int64_t>(only(event, 2), 0), steps[i]);
    const Fields value = fields_of(only(fields_of(only(event, 5)), 1));
    EXPECT_EQ(only(value, 1), "actor/pg_loss");
    const auto got = number_at<float>(only(value, 2), 0);
    if (std::isnan(values[i]))
      EXPECT_TRUE(std::isnan(got));
    else
      EXPECT_EQ(got, static_cast<float>(values[i]));
  }
}

TEST_F(EventFolder, ATagMayBeLongerThanALengthOfOneByteCanSay) {
  EventFile file(folder_);
  const std::string tag(300, 'x');
  file.scalar(tag, 7, 1);
  file.flush();
  EXPECT_EQ(only(fields_of(only(fields_of(only(events_of(file.path()).at(2), 5)), 1)), 1), tag);
}

TEST_F(EventFolder, EveryFileHasANameOfItsOwnInOrderOfTime) {
  std::string last;
  for (int i = 0; i < 3; ++i) {
    const EventFile file(folder_);
    const std::string name = file.path().filename().string();
    EXPECT_EQ(name.rfind("events.out.tfevents.", 0), 0u);
    EXPECT_GT(name, last);
    last = name;
  }
}

TEST_F(EventFolder, AFolderThatCannotBeMadeIsAnOptionError) {
  fs::create_directories(folder_);
  std::ofstream(folder_ / "file") << "in the way";
  EXPECT_THROW(EventFile(folder_ / "file" / "run"), OptionError);
}

TEST_F(EventFolder, ALineGivesTheScalarsOfItsKindThatItHas) {
  EventFile file(folder_);
  add_scalars(file, Json::parse(R"({"kind": "step", "step": 3, "loss": 0.5, "reward": null, "length": {"mean": 12},
                                    "seconds": {"generate": 2.5}, "schedule": "phased", "val": 1})"));
  add_scalars(file, Json::parse(R"({"kind": "evaluation", "step": 4, "accuracy": 0.75, "loss": 9})"));
  add_scalars(file, Json::parse(R"({"kind": "picture", "step": 4, "loss": 9})"));
  file.flush();
  std::map<std::string, std::pair<std::int64_t, float>> found;
  const std::vector<Fields> events = events_of(file.path());
  for (std::size_t i = 2; i < events.size(); ++i) {
    const Fields value = fields_of(only(fields_of(only(events[i], 5)), 1));
    found[only(value, 1)] = {number_at<std::int64_t>(only(events[i], 2), 0), number_at<float>(only(value, 2), 0)};
  }
  const std::map<std::string, std::pair<std::int64_t, float>> wanted = {{"actor/loss", {3, 0.5f}},
                                                                        {"response_length/mean", {3, 12.f}},
                                                                        {"timing_s/gen", {3, 2.5f}},
                                                                        {"val/accuracy", {4, 0.75f}}};
  EXPECT_EQ(found, wanted);
}

TEST(MetricTags, NoTagHasTwoFieldsOfOneKindUnlessOneIsInsideTheOther) {
  std::map<std::string, std::string> fields;
  for (const MetricTag& row : metric_tags()) {
    const auto [at, fresh] = fields.emplace(row.tag, row.field);
    EXPECT_TRUE(fresh || std::string(row.field).rfind(at->second + "/", 0) == 0) << row.tag;
  }
}

}  // namespace
}  // namespace espalier
