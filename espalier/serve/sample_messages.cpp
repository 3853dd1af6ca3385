#include "espalier/serve/sample_messages.h"

#include <cmath>
#include <limits>
#include <utility>

#include "espalier/base/error.h"
#include "espalier/serve/tensor_message.h"
#include "espalier/serve/wire.h"

namespace espalier::serve {
namespace {

constexpr std::int64_t kMostSamples = 1024, kMostLikely = 1024, kMostStops = 64;
constexpr float kNoLogprob = -99999;  // the SDK's padding, with token 0

std::vector<std::int64_t> read_integers(const Json& json, const std::string& where) {
  if (!json.is_array()) throw InputError({where, "a list of whole numbers", json.type_name(), ""});
  std::vector<std::int64_t> out;
  out.reserve(json.size());
  for (const Json& one : json) {
    if (!one.is_number_integer()) throw InputError({where, "whole numbers", one.dump(), ""});
    out.push_back(one.get<std::int64_t>());
  }
  return out;
}

std::vector<std::int32_t> read_prompt(const Fields& request, const BaseModel& model) {
  const Fields prompt(request.object("prompt"));
  const Json& chunks = prompt.member("chunks");
  if (!chunks.is_array()) throw InputError({"prompt", "a list of chunks", chunks.type_name(), ""});
  std::vector<std::int32_t> out;
  for (const Json& chunk : chunks) {
    if (!chunk.is_object()) throw InputError({"prompt", "chunks that are objects", chunk.type_name(), ""});
    const Fields fields(chunk);
    if (const std::string type = fields.text("type", "encoded_text"); type != "encoded_text")
      throw UnsupportedError({"prompt", "chunks of text", "a chunk of type " + type, "this server's models read text"});
    for (const std::int64_t id : read_integers(fields.member("tokens"), "prompt")) {
      if (id < 0 || id >= model.vocabulary)
        throw InputError({"prompt", text_of("token ids in [0, ", model.vocabulary, ")"), text_of(id), ""});
      out.push_back(static_cast<std::int32_t>(id));
    }
  }
  if (out.empty()) throw InputError({"prompt", "at least one token", "none", ""});
  if (std::ssize(out) > model.context)
    throw InputError({"prompt", text_of("at most ", model.context, " tokens, the context of ", model.name),
                      text_of(out.size()), ""});
  return out;
}

void read_stop(const Json& stop, const BaseModel& model, SampleCall& call) {
  if (stop.is_null()) return;
  if (stop.is_string()) {
    call.stop_texts.push_back(stop.get<std::string>());
  } else if (stop.is_array() && std::ssize(stop) <= kMostStops) {
    call.stops_at_end = !stop.empty();
    for (const Json& one : stop) {
      if (one.is_string() && call.stop_ids.empty())
        call.stop_texts.push_back(one.get<std::string>());
      else if (one.is_number_integer() && call.stop_texts.empty() && one >= 0 && one < model.vocabulary)
        call.stop_ids.push_back(one.get<std::int32_t>());
      else
        throw InputError({"sampling_params.stop", text_of("all texts, or all token ids in [0, ", model.vocabulary, ")"),
                          one.dump(-1, ' ', true, Json::error_handler_t::replace), ""});
    }
  } else {
    throw InputError({"sampling_params.stop", text_of("a text, or a list of at most ", kMostStops, " texts or ids"),
                      stop.type_name(), ""});
  }
  for (const std::string& text : call.stop_texts)
    if (text.empty()) throw InputError({"sampling_params.stop", "texts that are not empty", "an empty one", ""});
}

void read_sampling(const Fields& given, const BaseModel& model, SampleCall& call) {
  const std::int64_t room = model.context - std::ssize(call.prompt);
  call.most_tokens = room;
  if (given.has("max_tokens"))
    call.most_tokens = given.integer("max_tokens", 1, std::numeric_limits<std::int32_t>::max());
  if (call.most_tokens > room || room < 1)
    throw InputError({"sampling_params.max_tokens",
                      text_of("at most ", room, ": the prompt has ", call.prompt.size(), " tokens of the context of ",
                              model.context),
                      text_of(call.most_tokens), ""});
  call.temperature = given.number("temperature", 1);
  if (call.temperature < 0)
    throw InputError({"sampling_params.temperature", "at least 0", text_of(call.temperature), ""});
  call.top_p = given.number("top_p", 1);
  if (call.top_p <= 0 || call.top_p > 1)
    throw InputError({"sampling_params.top_p", "a number in (0, 1]", text_of(call.top_p), ""});
  call.top_k = given.integer("top_k", -1, std::numeric_limits<std::int32_t>::max(), -1);
  if (call.top_k == 0) throw InputError({"sampling_params.top_k", "at least 1, or -1 for all tokens", "0", ""});
  if (const Json& seed = given.member("seed"); seed.is_number_unsigned())
    call.seed = seed.get<std::uint64_t>();
  else if (given.has("seed"))
    call.seed = static_cast<std::uint64_t>(given.integer("seed", INT64_MIN, INT64_MAX));
  read_stop(given.member("stop"), model, call);
}

TargetTokens read_targets(const Json& json, std::int64_t rows, const BaseModel& model) {
  constexpr const char* kWhere = "target_prompt_logprobs";
  if (!json.is_object()) throw InputError({kWhere, "a tensor", json.type_name(), ""});
  const Fields fields(json);
  TargetTokens out;
  out.shape = read_integers(fields.member("shape"), kWhere);
  if (out.shape.size() != 2 || out.shape[0] != rows || out.shape[1] < 1 || out.shape[1] > model.vocabulary)
    throw InputError({kWhere, text_of("the shape [", rows, ", K]: a row for each token after the first"),
                      fields.member("shape").dump(), ""});
  for (const std::int64_t id : read_integers(fields.member("data"), kWhere)) {
    if (id < -1 || id >= model.vocabulary)
      throw InputError({kWhere, text_of("token ids in [0, ", model.vocabulary, "), or -1 for none"), text_of(id), ""});
    out.ids.push_back(static_cast<std::int32_t>(id));
  }
  if (!fields.has("sparse_crow_indices")) {
    if (std::ssize(out.ids) != rows * out.shape[1])
      throw InputError(
          {kWhere, text_of(rows * out.shape[1], " numbers, as its shape says"), text_of(out.ids.size()), ""});
    return out;
  }
  out.row_begins = read_integers(fields.member("sparse_crow_indices"), kWhere);
  out.columns = read_integers(fields.member("sparse_col_indices"), kWhere);
  bool fits = std::ssize(out.row_begins) == rows + 1 && out.columns.size() == out.ids.size() &&
              out.row_begins.front() == 0 && out.row_begins.back() == std::ssize(out.ids);
  for (std::size_t i = 1; fits && i < out.row_begins.size(); ++i) fits = out.row_begins[i] >= out.row_begins[i - 1];
  if (!fits) throw InputError({kWhere, "indices that fit the shape and the data", "indices that do not", ""});
  return out;
}

WireWriter likely_tokens(const std::vector<LikelyTokens>& rows, std::int64_t k) {
  enum { kIds = 1, kLogprobs = 2, kCount = 3, kLength = 4 };
  const auto width = static_cast<std::size_t>(k);
  std::vector<std::int32_t> ids(rows.size() * width, 0);
  std::vector<float> logprobs(rows.size() * width, kNoLogprob);
  for (std::size_t row = 0; row < rows.size(); ++row)
    for (std::size_t i = 0; i < std::min(width, rows[row].size()); ++i)
      std::tie(ids[row * width + i], logprobs[row * width + i]) = rows[row][i];
  WireWriter out;
  out.values(kIds, std::span<const std::int32_t>(ids));
  out.values(kLogprobs, std::span<const float>(logprobs));
  out.varint(kCount, width);
  out.varint(kLength, rows.size());
  return out;
}

template <class T>
WireWriter dense_tensor(const std::vector<T>& values, ElementType type, std::span<const std::int64_t> shape) {
  WireWriter out;
  out.values(1, std::span<const T>(values));
  out.varint(3, static_cast<std::uint64_t>(type));
  out.packed_varints(4, shape);
  return out;
}

WireWriter target_tensor(const std::vector<float>& values, const TargetTokens& targets) {
  if (targets.row_begins.empty()) return dense_tensor(values, ElementType::float32, targets.shape);
  WireWriter csr, out;
  csr.values(1, std::span<const float>(values));
  csr.values(2, std::span<const std::int64_t>(targets.row_begins));
  csr.values(3, std::span<const std::int64_t>(targets.columns));
  out.message(2, csr);
  out.varint(3, static_cast<std::uint64_t>(ElementType::float32));
  out.packed_varints(4, targets.shape);
  return out;
}

WireWriter drawn_tokens(const SampleAnswer& answer, std::int64_t k) {
  std::vector<std::int32_t> ids;
  std::vector<float> logprobs;
  for (const auto& row : answer.drawn_tokens) ids.insert(ids.end(), row.begin(), row.end());
  for (const auto& row : answer.drawn_logprobs) logprobs.insert(logprobs.end(), row.begin(), row.end());
  const std::int64_t shape[] = {std::ssize(answer.drawn_tokens), k};
  WireWriter out;
  out.message(1, dense_tensor(ids, ElementType::int32, shape));
  out.message(2, dense_tensor(logprobs, ElementType::float32, shape));
  return out;
}

WireWriter sequence_message(const SampledSequence& sequence, std::int64_t top) {
  enum { kReason = 1, kTokens = 2, kLogprobs = 3, kTop = 4 };
  enum { kStop = 0, kLength = 1 };
  WireWriter out;
  out.varint(kReason, sequence.stopped ? kStop : kLength);
  out.values(kTokens, std::span<const std::int32_t>(sequence.tokens));
  out.values(kLogprobs, std::span<const float>(sequence.logprobs));
  if (top > 0) out.message(kTop, likely_tokens(sequence.top, top));
  return out;
}

}  // namespace

SampleCall sample_call(const Fields& request, const BaseModel& model) {
  SampleCall call;
  call.prompt = read_prompt(request, model);
  const std::int64_t length = std::ssize(call.prompt);
  call.samples = request.integer("num_samples", 1, kMostSamples, 1);
  read_sampling(Fields(request.object("sampling_params")), model, call);
  if (request.flag("record_stability_info", false))
    throw UnsupportedError(
        {"record_stability_info", "samples without it", "true",
         "it belongs to the loss stable_reinforce, whose formula is not published; use another loss_fn"});
  call.prompt_logprobs = request.flag("prompt_logprobs", false);
  const std::int64_t likely = std::min(kMostLikely, model.vocabulary);
  call.top_prompt = request.integer("topk_prompt_logprobs", 0, likely, 0);
  call.top_sampled = request.integer("topk_sample_logprobs", 0, likely, 0);
  call.drawn_prompt = request.integer("prompt_alt_tokens_k", 0, kMostLikely, 0);
  if (request.has("prompt_logprobs_last_n")) {
    if (!call.prompt_logprobs) throw InputError({"prompt_logprobs_last_n", "prompt_logprobs beside it", "none", ""});
    call.first_prompt_logprob =
        length - request.integer("prompt_logprobs_last_n", 1, std::max<std::int64_t>(1, length - 1));
  }
  if (request.has("target_prompt_logprobs"))
    call.targets = read_targets(request.member("target_prompt_logprobs"), length - 1, model);
  return call;
}

std::string write_sample(const SampleAnswer& answer, const SampleCall& call) {
  enum { kSequences = 1, kPromptLogprobs = 2, kTopPrompt = 3, kCached = 4, kTargets = 5, kDrawn = 6 };
  WireWriter out;
  for (const SampledSequence& sequence : answer.sequences)
    out.message(kSequences, sequence_message(sequence, call.top_sampled));
  if (call.prompt_logprobs) out.values(kPromptLogprobs, std::span<const float>(answer.prompt_logprobs));
  if (call.top_prompt > 0) out.message(kTopPrompt, likely_tokens(answer.top_prompt, call.top_prompt));
  out.varint(kCached, static_cast<std::uint64_t>(answer.cached_tokens));
  if (call.targets) out.message(kTargets, target_tensor(answer.targets, *call.targets));
  if (call.drawn_prompt > 0) out.message(kDrawn, drawn_tokens(answer, call.drawn_prompt));
  return out.take();
}

}  // namespace espalier::serve
