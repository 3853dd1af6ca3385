// The safetensors reader and writer on valid files.
#include "espalier/checkpoint/safetensors.h"

#include "espalier/base/atomic_file.h"
#include "espalier/machine/memory.h"
#include "tests/unit/checkpoint/small_model.h"

namespace espalier::test {
namespace {

void write_file(const std::filesystem::path& path, const std::vector<TensorSpec>& specs,
                const std::vector<std::vector<std::byte>>& data, std::size_t piece) {
  OutputFile output(path);
  SafetensorsWriter writer(output, specs);
  for (const auto& values : data)
    for (std::size_t begin = 0; begin < values.size(); begin += piece)
      writer.append(values.data() + begin, static_cast<std::int64_t>(std::min(piece, values.size() - begin)));
  writer.finish();
  output.close_synced();
}

TEST(Safetensors, RoundTripsEveryTypeBitForBit) {
  const TemporaryDirectory folder;
  std::vector<TensorSpec> specs;
  std::vector<std::vector<std::byte>> data;
  for (const TensorType type :
       {TensorType::F64, TensorType::F32, TensorType::F16, TensorType::BF16, TensorType::I64, TensorType::I32,
        TensorType::I16, TensorType::I8, TensorType::U64, TensorType::U32, TensorType::U16, TensorType::U8,
        TensorType::BOOL, TensorType::F8_E4M3, TensorType::F8_E5M2, TensorType::F8_E8M0}) {
    specs.push_back({std::string("tensor ") + name_of(type), type, {3, 5}});
    data.push_back(random_bytes(static_cast<std::size_t>(15 * bytes_of(type)), specs.size()));
  }
  write_file(folder / "a.safetensors", specs, data, 7);
  const SafetensorsFile file(folder / "a.safetensors");
  ASSERT_EQ(file.entries().size(), specs.size());
  EXPECT_EQ(file.metadata().at("format"), "pt");
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const SafetensorsEntry* entry = file.find(specs[i].name);
    ASSERT_NE(entry, nullptr);
    EXPECT_EQ(entry->type, specs[i].type);
    EXPECT_EQ(entry->shape, specs[i].shape);
    EXPECT_EQ(entry->count, 15);
    ASSERT_EQ(entry->bytes, static_cast<std::int64_t>(data[i].size()));
    EXPECT_EQ(std::memcmp(entry->data, data[i].data(), data[i].size()), 0) << specs[i].name;
  }
  EXPECT_EQ(file.find("absent"), nullptr);
}

TEST(Safetensors, ForgottenPagesAreNotHeldAndCanBeReadAgain) {
  const TemporaryDirectory folder;
  constexpr std::int64_t kBytes = 32 << 20, kPage = 4096;
  const std::vector<std::byte> data = random_bytes(kBytes, 1);
  write_file(folder / "a", {{"x", TensorType::U8, {kBytes}}}, {data}, data.size());
  const SafetensorsFile file(folder / "a");
  const SafetensorsEntry& entry = file.entries().front();
  ASSERT_EQ(std::memcmp(entry.data, data.data(), data.size()), 0);
  const std::int64_t before = resident_bytes();
  forget_pages(entry);
  EXPECT_LE(resident_bytes(),
            before - kBytes + 2 * kPage + (1 << 20));  // 1 MiB: the counters of the system are rounded
  EXPECT_EQ(std::memcmp(entry.data, data.data(), data.size()), 0);
}

TEST(Safetensors, WritesExactlyTheseBytes) {
  const TemporaryDirectory folder;
  write_file(folder / "a", {{"x", TensorType::U8, {2}}, {"y", TensorType::U8, {}}},
             {{std::byte{'p'}, std::byte{'q'}}, {std::byte{'r'}}}, 100);
  std::string header = R"({"__metadata__":{"format":"pt"},"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
                       R"("y":{"dtype":"U8","shape":[],"data_offsets":[2,3]}})";
  while (header.size() % 8 != 0) header += ' ';
  EXPECT_EQ(read_text(folder / "a"), raw_safetensors(header, "pqr"));
}

TEST(Safetensors, ThePiecesOfAppendLeaveNoTrace) {
  const TemporaryDirectory folder;
  const std::vector<TensorSpec> specs = {{"x", TensorType::F32, {1 << 19}}};
  const std::vector<std::vector<std::byte>> data = {random_bytes(std::size_t{4} << 19, 3)};
  write_file(folder / "a", specs, data, 1000003);
  write_file(folder / "b", specs, data, 1 << 20);
  write_file(folder / "c", specs, data, std::size_t{4} << 19);
  EXPECT_EQ(read_text(folder / "a"), read_text(folder / "b"));
  EXPECT_EQ(read_text(folder / "a"), read_text(folder / "c"));
}

TEST(Safetensors, KeepsStrangeNamesEmptyTensorsAndScalars) {
  const TemporaryDirectory folder;
  const std::string strange = "a \"quoted\" \\ name\n with \x01 and \xc3\xa9";
  write_file(folder / "a", {{strange, TensorType::F32, {0, 7}}, {"", TensorType::F32, {}}}, {{}, random_bytes(4, 1)},
             100);
  const SafetensorsFile file(folder / "a");
  ASSERT_NE(file.find(strange), nullptr);
  EXPECT_EQ(file.find(strange)->count, 0);
  ASSERT_NE(file.find(""), nullptr);
  EXPECT_EQ(file.find("")->count, 1);
}

TEST(Safetensors, AFileWithoutTensorsIsValid) {
  const TemporaryDirectory folder;
  write_text(folder / "a", raw_safetensors("{}", ""));
  EXPECT_TRUE(SafetensorsFile(folder / "a").entries().empty());
}

TEST(Safetensors, ReadsEntriesInAnyOrderOfTheHeader) {
  const TemporaryDirectory folder;
  write_text(folder / "a", raw_safetensors(R"({"b":{"shape":[1],"data_offsets":[2,3],"dtype":"U8"},)"
                                           R"("a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}   )",
                                           "xyz"));
  const SafetensorsFile file(folder / "a");
  EXPECT_EQ(file.entries()[0].name, "a");
  EXPECT_EQ(static_cast<char>(*file.find("b")->data), 'z');
}

TEST(Safetensors, TheWriterNoticesMissingAndSurplusData) {
  const TemporaryDirectory folder;
  OutputFile output(folder / "a");
  SafetensorsWriter writer(output, {{"x", TensorType::U8, {2}}});
  EXPECT_THROW(writer.append("abc", 3), InternalError);
  writer.append("a", 1);
  EXPECT_THROW(writer.finish(), InternalError);
}

}  // namespace
}  // namespace espalier::test
