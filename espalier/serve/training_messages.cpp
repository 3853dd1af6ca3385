#include "espalier/serve/training_messages.h"

#include <cstring>
#include <utility>

#include "espalier/serve/tensor_message.h"

namespace espalier::serve {
namespace {

enum RequestField { kModel = 1, kSequence = 2, kData = 3, kLoss = 4, kConfig = 5, kForwardOnly = 6, kConfig2 = 7 };
enum DatumField { kInput = 1, kLossInputs = 2 };
enum ChunkField { kText = 1, kImage = 2, kAudio = 3 };
constexpr int kTokens = 1;                 // of an EncodedTextChunk
enum EntryField { kKey = 1, kValue = 2 };  // of a map
enum ConfigValueField { kNumber = 1, kWord = 2 };
constexpr const char* kOutputType = "TorchLossReturn";  // the SDK passes it on

void add_tokens(Bytes message, std::vector<std::int32_t>& tokens) {
  for (WireReader reader(message); reader.next();) {
    if (reader.field() != kTokens) continue;
    const Bytes ids = reader.bytes();
    if (ids.size() % sizeof(std::int32_t) != 0)
      throw InputError({"model_input", "tokens of four bytes", text_of(ids.size(), " bytes"), ""});
    const std::size_t before = tokens.size();
    tokens.resize(before + ids.size() / sizeof(std::int32_t));
    if (!ids.empty()) std::memcpy(tokens.data() + before, ids.data(), ids.size());
  }
}

void add_chunk(Bytes message, std::vector<std::int32_t>& tokens) {
  for (WireReader reader(message); reader.next();) {
    if (reader.field() == kText) add_tokens(reader.bytes(), tokens);
    if (reader.field() == kImage || reader.field() == kAudio)
      throw UnsupportedError({"model_input", "chunks of text", reader.field() == kImage ? "an image" : "audio",
                              "this server's models read text"});
  }
}

void add_input(Bytes message, std::map<std::string, Tensor>& inputs, std::int64_t& numbers) {
  std::string name;
  Bytes value;
  for (WireReader reader(message); reader.next();) {
    if (reader.field() == kKey) name = reader.text();
    if (reader.field() == kValue) value = reader.bytes();
  }
  try {
    inputs[name] = read_tensor(value, numbers);
  } catch (const InputError& error) {
    ErrorText text = error.text();
    text.where = name;
    throw InputError(std::move(text));
  }
}

NamedDatum read_datum(Bytes message, std::int64_t& numbers) {
  NamedDatum out;
  for (WireReader reader(message); reader.next();) {
    if (reader.field() == kInput) add_chunk(reader.bytes(), out.tokens);
    if (reader.field() == kLossInputs) add_input(reader.bytes(), out.inputs, numbers);
  }
  return out;
}

// An entry of either map; numbers and texts of the second one override.
void add_config(Bytes message, bool second, LossConfig& config) {
  std::string name;
  std::variant<double, std::string> value = 0.0;
  for (WireReader reader(message); reader.next();) {
    if (reader.field() == kKey) name = reader.text();
    if (reader.field() != kValue) continue;
    if (!second) {
      value = reader.number();
      continue;
    }
    for (WireReader inner(reader.bytes()); inner.next();) {
      if (inner.field() == kNumber) value = inner.number();
      if (inner.field() == kWord) value = inner.text();
    }
  }
  config[name] = std::move(value);
}

// Model and place in the order: whatever else is wrong, these must be readable.
void read_place(Bytes message, ForwardBackwardRequest& out) {
  for (WireReader reader(message); reader.next();) {
    if (reader.field() == kModel) out.model_id = reader.text();
    if (reader.field() == kSequence) out.seq_id = static_cast<std::int32_t>(reader.varint());
  }
}

void read_rest(Bytes message, ForwardBackwardRequest& out) {
  std::int64_t numbers = kMostNumbers;
  LossConfig second;
  for (WireReader reader(message); reader.next();) switch (reader.field()) {
      case kData: {
        if (std::ssize(out.data) == kMostData)
          throw InputError({"data", text_of("at most ", kMostData, " in a request"), "more", "send several requests"});
        try {
          out.data.push_back(read_datum(reader.bytes(), numbers));
        } catch (const Error& error) {
          ErrorText text = error.text();
          text.where = text_of("datum ", out.data.size(), ": ", text.where);
          if (error.exit_code() == UnsupportedError::kExitCode) throw UnsupportedError(std::move(text));
          throw InputError(std::move(text));
        }
        break;
      }
      case kLoss:
        out.loss_fn = reader.text();
        break;
      case kConfig:
        add_config(reader.bytes(), false, out.config);
        break;
      case kConfig2:
        add_config(reader.bytes(), true, second);
        break;
      case kForwardOnly:
        out.forward_only = reader.varint() != 0;
        break;
    }
  for (auto& [name, value] : second) out.config[name] = std::move(value);
}

WireWriter batched(const TrainingAnswer& answer, std::size_t begin, std::size_t end, std::int64_t columns) {
  enum { kBytes = 1, kOffsets = 2, kType = 3, kTrailing = 4 };
  std::vector<float> values;
  std::vector<std::int64_t> offsets{0};
  for (std::size_t i = begin; i < end; ++i) {
    values.insert(values.end(), answer.logprobs[i].begin(), answer.logprobs[i].end());
    offsets.push_back(static_cast<std::int64_t>(values.size() * sizeof(float)));
  }
  WireWriter out;
  out.values(kBytes, std::span<const float>(values));
  out.values(kOffsets, std::span<const std::int64_t>(offsets));
  out.varint(kType, static_cast<std::uint64_t>(ElementType::float32));
  if (columns > 0) out.packed_varints(kTrailing, {&columns, 1});
  return out;
}

}  // namespace

ForwardBackwardRequest read_forward_backward(Bytes message) {
  ForwardBackwardRequest out;
  read_place(message, out);
  try {
    read_rest(message, out);
  } catch (const Error& error) {
    out.data.clear();
    out.refused = error.text();
    out.unsupported = error.exit_code() == UnsupportedError::kExitCode;
  }
  return out;
}

std::string write_forward_backward(const TrainingAnswer& answer, const TrainingCall& call) {
  enum { kType = 1, kOutputs = 2, kMetrics = 3 };
  enum { kTag = 1, kFields = 2, kCount = 3 };
  const auto trailing = [&](std::size_t i) { return call.data[i].is_wide ? call.data[i].columns : 0; };
  WireWriter out;
  out.text(kType, kOutputType);
  // A record has one trailing shape: data of another one begin the next, so that the order is kept.
  for (std::size_t begin = 0; begin < call.data.size();) {
    std::size_t end = begin;
    while (end < call.data.size() && trailing(end) == trailing(begin)) ++end;
    WireWriter entry, record;
    entry.text(kKey, "logprobs");
    entry.message(kValue, batched(answer, begin, end, trailing(begin)));
    record.text(kTag, kOutputType);
    record.message(kFields, entry);
    record.varint(kCount, end - begin);
    out.message(kOutputs, record);
    begin = end;
  }
  for (const auto& [name, value] : answer.metrics) {
    WireWriter entry;
    entry.text(kKey, name);
    entry.number(kValue, value);
    out.message(kMetrics, entry);
  }
  return out.take();
}

}  // namespace espalier::serve
