// Damaged model directories and run states.
#include "tests/hostile/checkpoint/save_version.h"

namespace espalier::test {
namespace {

namespace fs = std::filesystem;

struct HostileDirectory : ::testing::Test {
  TemporaryDirectory folder;
  ModelShape shape = saved_shape();
  ParameterTable table{shape};
  fs::path out = folder / "out", index = out / "model.safetensors.index.json";

  void SetUp() override {
    fs::create_directory(folder / "source");
    write_text(folder / "source" / "config.json", "{}");
    save_version(folder / "source", out, 1);
  }
  void load() const {
    std::vector<float> values(static_cast<std::size_t>(table.size()));
    load_parameters(out, table, DType::float32, values.data());
  }
  void load_state() const {
    std::vector<float> a(static_cast<std::size_t>(table.size())), b(a.size()), c(a.size());
    load_run_state(out, fingerprint_of(shape), table, DType::float32, a.data(), b.data(), c.data());
  }
  std::string error() const {
    return message_of<InputError>([&] { load(); });
  }
  std::string error_with_index(const std::string& text) const {
    write_text(index, text);
    return error();
  }
  fs::path shard(int number) const {
    for (const auto& entry : fs::directory_iterator(out))
      if (entry.path().filename().string().starts_with(text_of("model-0000", number, "-"))) return entry.path();
    ADD_FAILURE() << "no shard " << number;
    return {};
  }
};

TEST_F(HostileDirectory, AMissingShardIsNamed) {
  const std::string name = shard(2).filename();
  fs::remove(shard(2));
  EXPECT_HOLDS(error(), "the weight file '" + name + "', got no such file");
}

TEST_F(HostileDirectory, ATruncatedShardIsNamed) {
  const std::string content = read_text(shard(1));
  for (const std::size_t length : {std::size_t{0}, std::size_t{9}, content.size() / 2, content.size() - 1}) {
    write_text(shard(1), content.substr(0, length));
    EXPECT_HOLDS(error(), shard(1).string()) << length;
  }
}

TEST_F(HostileDirectory, SwappedShardsAreNoticed) {
  const fs::path one = shard(1), two = shard(2);
  fs::rename(one, folder / "x");
  fs::rename(two, one);
  fs::rename(folder / "x", two);
  EXPECT_HOLDS(error(), "expected only tensors that the index names for this file");
}

TEST_F(HostileDirectory, TheIndexCannotLeaveItsDirectory) {
  fs::copy_file(shard(1), folder / "secret.safetensors");
  for (const std::string file : {"../secret.safetensors", "/etc/passwd", "..", ".", "", "a/b", "x\\u0000y"})
    EXPECT_HOLDS(error_with_index("{\"weight_map\":{\"model.norm.weight\":\"" + file + "\"}}"),
                 "expected the name of a file in the same directory");
}

TEST_F(HostileDirectory, BadIndicesAreRefused) {
  EXPECT_HOLDS(error_with_index(""), "no valid JSON");
  EXPECT_HOLDS(error_with_index("[]"), "expected a JSON object, got array");
  EXPECT_HOLDS(error_with_index("{}"), "expected weight_map");
  EXPECT_HOLDS(error_with_index("{\"weight_map\":{}}"), "expected weight_map");
  EXPECT_HOLDS(error_with_index("{\"weight_map\":[1]}"), "expected weight_map");
  EXPECT_HOLDS(error_with_index("{\"weight_map\":{\"a\":{\"b\":1}}}"), "got 'object'");
  EXPECT_HOLDS(error_with_index("{\"a\":" + std::string(1'000'000, '[')), "levels");
  EXPECT_HOLDS(error_with_index("{\"weight_map\":{\"a\":\"nothing.safetensors\"}}"), "no such file");
  fs::remove(index);
  fs::create_directory(index);
  EXPECT_HOLDS(error(), "a regular file");
}

TEST_F(HostileDirectory, AnIndexThatNamesTooMuchOrTooLittleIsNoticed) {
  const std::string text = read_text(index), name = "\"model.norm.weight\"";
  std::string changed = text;
  changed.replace(changed.find(name), name.size(), "\"model.nrom.weight\"");
  EXPECT_HOLDS(error_with_index(changed), "only tensors that the index names for this file");
  changed = text;
  const std::size_t map = changed.find("\"model.embed_tokens");
  changed.insert(map, "\"phantom\": \"" + shard(1).filename().string() + "\", ");
  write_text(index, changed);
  EXPECT_NO_THROW(load());  // nobody needs it, so that transformers reads the model, too
}

TEST_F(HostileDirectory, NoDirectoryIsNamed) {
  out = folder / "nowhere";
  EXPECT_HOLDS(error(), "got nothing there");
  out = folder / "source" / "config.json";
  EXPECT_HOLDS(error(), "got a file");
}

TEST_F(HostileDirectory, EveryTruncationOfTheStateIsRefused) {
  const fs::path file = out / "espalier" / "state.json";
  const std::string content = read_text(file);
  ASSERT_NO_THROW(load_state());
  for (std::size_t length = 0; length + 2 < content.size(); ++length) {  // the last byte is a newline
    write_text(file, content.substr(0, length));
    EXPECT_HOLDS(message_of<InputError>([&] { load_state(); }), "state.json") << length;
  }
}

TEST_F(HostileDirectory, FlippedBitsOfTheStateNeverEscape) {
  const fs::path file = out / "espalier" / "state.json";
  const std::string content = read_text(file);
  for (std::size_t byte = 0; byte < content.size(); ++byte)
    for (int bit = 0; bit < 8; bit += 3) {
      std::string damaged = content;
      damaged[byte] = static_cast<char>(damaged[byte] ^ (1 << bit));
      write_text(file, damaged);
      try {
        load_state();
      } catch (const InputError&) {
      }
    }
}

TEST_F(HostileDirectory, ADamagedStateFileIsNamed) {
  const fs::path file = out / "espalier" / "state.safetensors";
  const std::string content = read_text(file);
  const auto state_error = [&] { return message_of<InputError>([&] { load_state(); }); };
  for (const std::size_t length : {std::size_t{0}, std::size_t{7}, std::size_t{500}, content.size() - 1}) {
    write_text(file, content.substr(0, length));
    EXPECT_HOLDS(state_error(), "state.safetensors") << length;
  }
  write_text(file, read_text(shard(1)));
  EXPECT_HOLDS(state_error(), "expected masters and moments after step 1, got no step");
  std::string renamed = content;
  renamed.replace(renamed.find("exp_avg.model.norm"), 18, "exp_avg.model.mron");
  write_text(file, renamed);
  EXPECT_HOLDS(state_error(), "tensor 'exp_avg.model.norm.weight': expected this tensor, got none");
  fs::remove(file);
  EXPECT_HOLDS(state_error(), "No such file or directory");
}

}  // namespace
}  // namespace espalier::test
