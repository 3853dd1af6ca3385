// The run state: exact, and refused when it belongs to something else.
#include "espalier/checkpoint/run_state.h"

#include "tests/support/layers.h"
#include "tests/unit/checkpoint/small_model.h"

namespace espalier::test {
namespace {

namespace fs = std::filesystem;

struct RunStateFiles : ::testing::Test {
  TemporaryDirectory folder;
  ModelShape shape = llama_shape();
  ParameterTable table{shape};
  RunState state;

  void SetUp() override {
    state.step = 12, state.epoch = 3, state.mini_batch = 7;
    state.random_state = "1 2 \"3\" 18446744073709551615";
    state.options = R"({"lr":1e-06,"schedule":"auto","z":[1,2]})";
    state.extra = R"({"best":0.1})";
    state.sum_order = SumOrder{{"NCCL_ALGO", "Ring"}};
    state.model = fingerprint_of(shape);
  }
  std::vector<std::byte> bits(std::uint64_t seed) const {
    return random_bytes(static_cast<std::size_t>(table.size() * bytes_of(state.accumulators)), seed);
  }
  void save() const { save_run_state(folder.path(), state, table, bits(1).data(), bits(2).data(), bits(3).data()); }
  RunState load() const {
    std::vector<std::byte> buffer(static_cast<std::size_t>(table.size() * 8));
    return load_run_state(folder.path(), fingerprint_of(shape), table, state.accumulators, buffer.data(), buffer.data(),
                          buffer.data());
  }
  std::string error() const {
    return message_of<InputError>([&] { load(); });
  }
  fs::path json() const { return folder / "espalier" / "state.json"; }
  void replace(const std::string& from, const std::string& to) const {
    std::string text = read_text(json());
    ASSERT_EQ(holds(text, from), true) << from << " in " << text;
    write_text(json(), text.replace(text.find(from), from.size(), to));
  }
};

TEST_F(RunStateFiles, ComesBackBitForBit) {
  for (const DType accumulators : {DType::float32, DType::float64}) {
    state.accumulators = accumulators;
    state.dtype = accumulators == DType::float64 ? DType::float64 : DType::bfloat16;
    save();
    std::vector<std::byte> masters(bits(1).size()), first(masters.size()), second(masters.size());
    const RunState back =
        load_run_state(folder.path(), state.model, table, accumulators, masters.data(), first.data(), second.data());
    EXPECT_EQ(masters, bits(1));
    EXPECT_EQ(first, bits(2));
    EXPECT_EQ(second, bits(3));
    EXPECT_EQ(back.step, 12);
    EXPECT_EQ(back.epoch, 3);
    EXPECT_EQ(back.mini_batch, 7);
    EXPECT_EQ(back.random_state, state.random_state);
    EXPECT_EQ(back.sum_order, state.sum_order);
    EXPECT_EQ(back.options, state.options);
    EXPECT_EQ(back.extra, state.extra);
    EXPECT_EQ(back.model, state.model);
    EXPECT_EQ(back.dtype, state.dtype);
    EXPECT_EQ(back.accumulators, accumulators);
  }
}

TEST_F(RunStateFiles, TheSameStateGivesTheSameBytes) {
  save();
  const std::string one = read_text(json()), data = read_text(folder / "espalier" / "state.safetensors");
  save();
  EXPECT_EQ(read_text(json()), one);
  EXPECT_EQ(read_text(folder / "espalier" / "state.safetensors"), data);
}

TEST_F(RunStateFiles, NamesAMissingCheckpoint) { EXPECT_HOLDS(error(), "espalier/state.json: expected a checkpoint"); }

TEST_F(RunStateFiles, RefusesAnotherModel) {
  save();
  testing::change_attention(shape, [](AttentionShape& a, std::size_t) { a.rope.theta = 500000; });  // same tensors
  EXPECT_HOLDS(error(), "rope_theta=500000");
}

TEST_F(RunStateFiles, RefusesAnotherNumberFormat) {
  save();
  state.accumulators = DType::float64;
  EXPECT_HOLDS(error(), "expected float64, got float32");
}

TEST_F(RunStateFiles, RefusesAnotherVersion) {
  save();
  replace("\"version\": 1", "\"version\": 2");
  EXPECT_HOLDS(error(), "another version of Espalier");
}

TEST_F(RunStateFiles, RefusesFilesOfDifferentSteps) {
  save();
  replace("\"step\": 12", "\"step\": 13");
  EXPECT_HOLDS(error(), "expected masters and moments after step 13, got step 12");
}

TEST_F(RunStateFiles, NamesWrongMembers) {
  for (const auto& [from, to, text] :
       {std::tuple{"\"epoch\": 3", "\"epoch\": -3", "epoch: expected a whole number from 0 on, got -3"},
        {"\"epoch\": 3", "\"epoch\": 3.5", "got 3.5"},
        {"\"epoch\": 3", "\"epoch\": 99999999999999999999", "epoch: expected a whole number"},
        {"\"epoch\": 3", "\"epoch\": 18446744073709551615", "epoch: expected a whole number"},
        {"\"epoch\": 3", "\"epok\": 3", "epoch: expected this member, got none"},
        {"\"dtype\": \"float32\"", "\"dtype\": \"int4\"", "dtype: expected float64, float32 or bfloat16, got 'int4'"},
        {"\"options\": {", "\"options\": 1, \"more\": {", "options: expected an object, got number"},
        {"espalier-state", "something", "format: expected espalier-state, got 'something'"}}) {
    save();
    replace(from, to);
    EXPECT_HOLDS(error(), text);
  }
}

TEST_F(RunStateFiles, TheFingerprintTellsShapesApart) {
  const std::string plain = fingerprint_of(shape);
  const auto differs = [&](auto change) {
    ModelShape other = llama_shape();
    change(other);
    return fingerprint_of(other) != plain;
  };
  EXPECT_FALSE(differs([](ModelShape&) {}));
  const auto attention_differs = [&](auto change) {
    return differs([&](ModelShape& other) {
      testing::change_attention(other, [&](AttentionShape& a, std::size_t) { change(a); });
    });
  };
  EXPECT_TRUE(attention_differs([](AttentionShape& a) { a.heads = 2, a.head_dim = 4; }));
  EXPECT_TRUE(differs([](ModelShape& other) { other.rms_norm_eps = 1.0000001e-6; }));
  EXPECT_TRUE(attention_differs([](AttentionShape& a) { a.rope.has_scaling = true; }));
  EXPECT_TRUE(differs([](ModelShape& other) { other.tied_head = true; }));
  EXPECT_TRUE(differs([](ModelShape& other) { other.architecture = "Qwen2ForCausalLM"; }));
}

}  // namespace
}  // namespace espalier::test
