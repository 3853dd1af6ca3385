// Requests and answers of training as bytes: what is read back, and what is refused without a crash.
#include <gtest/gtest.h>

#include "damage.h"
#include "espalier/serve/tensor_message.h"
#include "espalier/serve/training_messages.h"

namespace espalier::serve {
namespace {

template <class T>
WireWriter dense(std::uint64_t type, std::vector<std::int64_t> shape, std::vector<T> values) {
  WireWriter out;
  out.values(1, std::span<const T>(values));
  out.varint(3, type);
  out.packed_varints(4, shape);
  return out;
}

WireWriter sparse(std::vector<std::int64_t> shape, std::vector<std::int64_t> row_begins,
                  std::vector<std::int64_t> columns, std::vector<std::int64_t> values) {
  WireWriter csr, out;
  csr.values(1, std::span<const std::int64_t>(values));
  csr.values(2, std::span<const std::int64_t>(row_begins));
  csr.values(3, std::span<const std::int64_t>(columns));
  out.message(2, csr);
  out.varint(3, 2);
  out.packed_varints(4, shape);
  return out;
}

Tensor read(WireWriter writer, std::int64_t numbers = 100) {
  const std::string bytes = writer.take();
  return read_tensor(bytes_of_text(bytes), numbers);
}

TEST(TensorMessage, AllTypesAreRead) {
  EXPECT_EQ(read(dense<float>(1, {2}, {0.5f, -1})).floats, (std::vector<float>{0.5f, -1}));
  EXPECT_EQ(read(dense<std::int64_t>(2, {1, 2}, {7, -8})).integers, (std::vector<std::int64_t>{7, -8}));
  EXPECT_EQ(read(dense<std::int32_t>(3, {}, {7, -8})).integers, (std::vector<std::int64_t>{7, -8}));
  EXPECT_EQ(read(dense<std::uint16_t>(4, {2}, {0x3f80, 0xc000})).floats, (std::vector<float>{1, -2}));
}

TEST(TensorMessage, SparseTensorsAreFilledUp) {
  const Tensor tensor = read(sparse({3, 2}, {0, 1, 1, 3}, {1, 0, 1}, {5, 6, 7}));
  EXPECT_EQ(tensor.integers, (std::vector<std::int64_t>{0, 5, 0, 0, 6, 7}));
}

TEST(TensorMessage, WhatDoesNotFitIsRefused) {
  EXPECT_THROW(read(dense<float>(1, {3}, {1, 2})), InputError);                           // another count
  EXPECT_THROW(read(dense<float>(1, {-2}, {1, 2})), InputError);                          // a negative side
  EXPECT_THROW(read(dense<float>(0, {2}, {1, 2})), InputError);                           // no type
  EXPECT_THROW(read(dense<float>(9, {2}, {1, 2})), InputError);                           // an unknown one
  EXPECT_THROW(read(dense<std::uint16_t>(1, {1}, {1})), InputError);                      // half an element
  EXPECT_THROW(read(dense<float>(1, {2}, {1, 2}), 1), InputError);                        // too many
  EXPECT_THROW(read(dense<float>(1, std::vector<std::int64_t>(9, 1), {1})), InputError);  // too many sides
  EXPECT_THROW(read(sparse({INT64_MAX, INT64_MAX}, {0}, {}, {})), InputError);
  EXPECT_THROW(read(sparse({2, 2}, {0, 1}, {0}, {5})), InputError);     // a row is missing
  EXPECT_THROW(read(sparse({2, 2}, {0, 2, 1}, {0}, {5})), InputError);  // rows that go back
  EXPECT_THROW(read(sparse({2, 2}, {1, 1, 1}, {0}, {5})), InputError);  // a start beyond 0
  EXPECT_THROW(read(sparse({2, 2}, {0, 1, 1}, {2}, {5})), InputError);  // a column beyond the width
  EXPECT_THROW(read(sparse({2, 2}, {0, 1, 1}, {-1}, {5})), InputError);
  EXPECT_THROW(read(sparse({2, 2}, {0, 0, 0}, {0}, {5})), InputError);  // a value that no row has
  EXPECT_THROW(read(sparse({4}, {0, 1}, {0}, {5})), InputError);        // one dimension
}

std::string request() {
  WireWriter tokens, chunk, entry, datum, config, config_value, config2, out;
  const std::vector<std::int32_t> ids{3, 1, 2};
  tokens.values(1, std::span<const std::int32_t>(ids));
  chunk.message(1, tokens);
  entry.text(1, "target_tokens");
  entry.message(2, dense<std::int64_t>(2, {3}, {1, 2, 4}));
  datum.message(1, chunk);
  datum.message(1, chunk);  // chunks follow each other
  datum.message(2, entry);
  config.text(1, "beta");
  config.number(2, 0.5);
  config_value.text(2, "words");
  config2.text(1, "beta");
  config2.message(2, config_value);
  out.text(1, "s1:train:0");
  out.varint(2, 7);
  out.message(3, datum);
  out.text(4, "dro");
  out.message(5, config);
  out.varint(6, 1);
  out.message(7, config2);
  out.text(99, "a field of a later version");
  return out.take();
}

TEST(TrainingMessages, ARequestIsRead) {
  const std::string bytes = request();
  const ForwardBackwardRequest read = read_forward_backward(bytes_of_text(bytes));
  EXPECT_EQ(read.model_id, "s1:train:0");
  EXPECT_EQ(read.seq_id, 7);
  EXPECT_EQ(read.loss_fn, "dro");
  EXPECT_TRUE(read.forward_only);
  EXPECT_EQ(std::get<std::string>(read.config.at("beta")), "words");  // the second map overrides
  ASSERT_EQ(read.data.size(), 1u);
  EXPECT_EQ(read.data[0].tokens, (std::vector<std::int32_t>{3, 1, 2, 3, 1, 2}));
  EXPECT_EQ(read.data[0].inputs.at("target_tokens").integers, (std::vector<std::int64_t>{1, 2, 4}));
  EXPECT_FALSE(read.refused);
}

TEST(TrainingMessages, WhatIsWrongWithADatumKeepsTheRequestsPlace) {
  WireWriter image, chunk, datum, out;
  image.text(1, "pixels");
  chunk.message(2, image);
  datum.message(1, chunk);
  out.text(1, "m");
  out.varint(2, 3);
  out.message(3, datum);
  const std::string bytes = out.take();
  const ForwardBackwardRequest read = read_forward_backward(bytes_of_text(bytes));
  EXPECT_EQ(read.model_id, "m");
  EXPECT_EQ(read.seq_id, 3);
  ASSERT_TRUE(read.refused);
  EXPECT_TRUE(read.unsupported);
  EXPECT_NE(read.refused->where.find("datum 0"), std::string::npos);
}

// Any damage ends in an answer: a request, or an InputError. Sanitizers watch over the memory.
TEST(TrainingMessages, DamagedBytesNeverLeaveTheirBounds) {
  const std::string whole = request();
  const auto read_any = [](const std::string& bytes) {
    try {
      (void)read_forward_backward(bytes_of_text(bytes));
    } catch (const InputError&) {
    }
  };
  for (std::size_t end = 0; end <= whole.size(); ++end) read_any(whole.substr(0, end));
  Random random(5);
  for (int round = 0; round < 20000; ++round) read_any(damaged(whole, random));
}

TEST(TrainingMessages, AnswersAreRecordsOfEqualShape) {
  TrainingCall call;
  call.data.resize(3);
  call.data[1].is_wide = true, call.data[1].columns = 2;
  TrainingAnswer answer;
  answer.logprobs = {{-1}, {-2, -3, -4, -5}, {-6, -7}};
  answer.metrics["loss:sum"] = 1.5;
  const std::string bytes = write_forward_backward(answer, call);
  std::vector<std::uint64_t> counts;
  double loss = 0;
  for (WireReader reader(bytes_of_text(bytes)); reader.next();) {
    if (reader.field() == 2)
      for (WireReader record(reader.bytes()); record.next();)
        if (record.field() == 3) counts.push_back(record.varint());
    if (reader.field() == 3)
      for (WireReader entry(reader.bytes()); entry.next();)
        if (entry.field() == 2) loss = entry.number();
  }
  EXPECT_EQ(counts, (std::vector<std::uint64_t>{1, 1, 1}));
  EXPECT_EQ(loss, 1.5);
}

}  // namespace
}  // namespace espalier::serve
