#include "espalier/hosting/hosted_sampler.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "espalier/base/error.h"
#include "espalier/base/units.h"
#include "espalier/shape/path_leaves.h"

namespace espalier {
namespace {

// Prompts whose rows stay after their last response: for further samples, and for the next turns of conversations.
constexpr std::int64_t kKeptPrompts = 64;
// Responses that may join a prompt whose first response runs already: clients ask for a group one by one.
constexpr std::int64_t kSparePlaces = 64;

constexpr std::uint64_t kPromptStream = std::uint64_t{1} << 40;  // of a seed: beyond the streams of samples

serve::LikelyTokens floats(const LikelyTokens& tokens) {
  serve::LikelyTokens out;
  for (const TokenLogprob& one : tokens) out.emplace_back(one.token, static_cast<float>(one.logprob));
  return out;
}

}  // namespace

HostedSampler::HostedSampler(HostedBase& base, Hosting& hosting, std::unique_ptr<ModelState> weights)
    : base_(base), hosting_(hosting), weights_(std::move(weights)), kv_bytes_(hosting.kv_bytes) {}

Decoder& HostedSampler::decoder() { return weights_ ? weights_->decoder : base_.decoder(); }

Decoding& HostedSampler::decoding() {
  if (!decoding_) {
    DecodingLimits limits;
    limits.kv_bytes = kv_bytes_;
    limits.spare_places = kSparePlaces, limits.kept_prompts = kKeptPrompts;
    limits.prompt_rows = kMostPromptRows;  // after which others have their turn
    limits.may_wait = true;                // for other samplers, which have the memory now
    decoding_ = std::make_unique<Decoding>(decoder(), limits, hosting_.calls.decoding().arena);
  }
  return *decoding_;
}

void HostedSampler::require_room(const serve::SampleCall& request) const {
  const ModelShape& shape = base_.model().shape;
  const std::int64_t rows = std::ssize(request.prompt) + request.most_tokens,
                     bytes = rows * kv_bytes_per_token(shape, base_.model().dtype);
  if (bytes > hosting_.kv_bytes)
    throw MemoryBudgetError({"the sample", text_of("keys and values within ", format_bytes(hosting_.kv_bytes)),
                             text_of(format_bytes(bytes), " for ", request.prompt.size(), " tokens of the prompt and ",
                                     request.most_tokens, " of max_tokens"),
                             text_of("lower max_tokens, or start the server with a --memory-budget that is larger by ",
                                     format_bytes(4 * (bytes - hosting_.kv_bytes)))});
}

// Requests about the prompt's own positions, as edges of its rows: its next tokens first, then the targets.
void HostedSampler::read_prompt(Call& call) {
  const serve::SampleCall& request = call.request;
  if (!request.reads_prompt()) return;
  struct Wanted {
    HeadEdge edge;
    std::size_t target;  // index of the target; of the prompt's own tokens: beyond all
  };
  constexpr std::size_t kOwn = std::numeric_limits<std::size_t>::max();
  std::vector<Wanted> wanted;
  if (request.prompt_logprobs)
    for (std::int64_t i = std::max<std::int64_t>(1, request.first_prompt_logprob); i < std::ssize(request.prompt); ++i)
      wanted.push_back({{static_cast<std::int32_t>(i - 1), request.prompt[static_cast<std::size_t>(i)]}, kOwn});
  if (request.targets) {
    const serve::TargetTokens& targets = *request.targets;
    std::int64_t row = 0;
    for (std::size_t i = 0; i < targets.ids.size(); ++i) {
      const auto at = static_cast<std::int64_t>(i);
      if (targets.row_begins.empty())
        row = at / targets.shape[1];
      else
        while (targets.row_begins[static_cast<std::size_t>(row) + 1] <= at) ++row;
      if (targets.ids[i] >= 0) wanted.push_back({{static_cast<std::int32_t>(row), targets.ids[i]}, i});
    }
    call.edge_of_target.assign(targets.ids.size(), kOwn);
  }
  std::ranges::stable_sort(wanted, {}, [](const Wanted& one) { return one.edge.output; });
  call.reading = std::make_shared<PromptReading>();
  for (const Wanted& one : wanted) {
    if (one.target != kOwn) call.edge_of_target[one.target] = call.reading->edges.size();
    call.reading->edges.push_back(one.edge);
  }
  call.reading->top = request.top_prompt;
  call.reading->draws = request.drawn_prompt;
  call.reading->draw_rule = {request.temperature, 0, 1.0};
  call.reading->random = Random(*request.seed).fork(kPromptStream);
}

void HostedSampler::add(std::int64_t ticket, const serve::SampleCall& request, Done done) {
  require_room(request);
  auto call = std::make_unique<Call>();
  call->request = request;
  call->done = std::move(done);
  call->left = request.samples;
  call->answer.sequences.resize(static_cast<std::size_t>(request.samples));
  if (!request.stop_texts.empty()) call->stops = std::make_unique<StopStrings>(request.stop_texts, base_.tokenizer());
  read_prompt(*call);
  base_.reserve_positions(decoder(), std::ssize(request.prompt) + request.most_tokens);
  std::vector<std::int32_t> stop_ids = request.stop_ids;
  if (request.stops_at_end) stop_ids.insert(stop_ids.end(), base_.end_tokens().begin(), base_.end_tokens().end());
  const Random random(*request.seed);
  std::vector<DecodingRules> rules;
  for (std::int64_t i = 0; i < request.samples; ++i)
    rules.push_back({.choice = {request.temperature, request.top_k, request.top_p},
                     .longest = request.most_tokens,
                     .stop_ids = stop_ids,
                     .stops = call->stops.get(),
                     .random = random.fork(static_cast<std::uint64_t>(i)),
                     .raw_logprobs = hosting_.raw_logprobs,
                     .top = request.top_sampled});
  const std::int64_t first = decoding().add(request.prompt, std::move(rules), "the prompt", call->reading);
  for (std::int64_t i = 0; i < request.samples; ++i) {
    call->responses.push_back(first + i);
    of_[first + i] = {call.get(), static_cast<std::size_t>(i)};
  }
  calls_[ticket] = std::move(call);
}

void HostedSampler::take(Call& call, std::size_t sample, std::int64_t number) {
  const DecodedResponse& from = decoding_->response(number);
  serve::SampledSequence& to = call.answer.sequences[sample];
  to.tokens = from.tokens;
  to.logprobs.assign(from.logprobs.begin(), from.logprobs.end());
  to.stopped = from.end == ResponseEnd::stop;
  for (const LikelyTokens& tokens : from.likeliest) to.top.push_back(floats(tokens));
  if (sample == 0) call.answer.cached_tokens = from.cached_rows;
  decoding_->remove(number);
  of_.erase(number);
  --call.left;
}

void HostedSampler::finish_reading(Call& call) const {
  const serve::SampleCall& request = call.request;
  serve::SampleAnswer& answer = call.answer;
  const std::size_t length = request.prompt.size();
  constexpr float kNone = std::numeric_limits<float>::quiet_NaN();
  if (request.prompt_logprobs) answer.prompt_logprobs.assign(length, kNone);
  if (request.top_prompt > 0) answer.top_prompt.resize(length);
  if (!call.reading) return;
  const PromptReading& reading = *call.reading;
  const auto first = static_cast<std::size_t>(std::max<std::int64_t>(1, request.first_prompt_logprob));
  std::vector<std::uint8_t> is_target(reading.edges.size(), 0);
  for (const std::size_t edge : call.edge_of_target)
    if (edge < is_target.size()) is_target[edge] = 1;
  if (request.prompt_logprobs)
    for (std::size_t i = 0; i < reading.edges.size(); ++i)
      if (!is_target[i])
        answer.prompt_logprobs[static_cast<std::size_t>(reading.edges[i].output) + 1] =
            static_cast<float>(reading.logprobs[i]);
  if (request.top_prompt > 0)
    for (std::size_t i = first; i < length; ++i) answer.top_prompt[i] = floats(reading.likeliest[i - 1]);
  for (const std::size_t edge : call.edge_of_target)
    answer.targets.push_back(edge < reading.logprobs.size() ? static_cast<float>(reading.logprobs[edge]) : 0.0f);
  for (std::size_t row = 0; row + 1 < length && request.drawn_prompt > 0; ++row) {
    answer.drawn_tokens.emplace_back();
    answer.drawn_logprobs.emplace_back();
    for (const TokenLogprob& one : reading.drawn[row]) {
      answer.drawn_tokens.back().push_back(one.token);
      answer.drawn_logprobs.back().push_back(static_cast<float>(one.logprob));
    }
  }
}

void HostedSampler::step() {
  if (calls_.empty()) return;
  const at::AutoDispatchBelowADInplaceOrView unrecorded;  // as the passes of a step
  decoding().set_kv_bytes(kv_bytes_);
  std::vector<std::int64_t> ended;
  try {
    ended = decoding_->step();
  } catch (...) {
    return fail(std::current_exception());
  }
  for (const std::int64_t number : ended) {
    const auto [call, sample] = of_.at(number);
    take(*call, sample, number);
    if (call->left > 0) continue;
    finish_reading(*call);
    call->done(&call->answer, nullptr);
    std::erase_if(calls_, [&, gone = call](const auto& one) { return one.second.get() == gone; });
  }
}

bool HostedSampler::cancel(std::int64_t ticket) {
  const auto found = calls_.find(ticket);
  if (found == calls_.end()) return false;
  const std::unique_ptr<Call> call = std::move(found->second);
  calls_.erase(found);
  for (const std::int64_t number : call->responses)
    if (of_.erase(number) > 0) decoding_->remove(number);
  call->done(nullptr, std::make_exception_ptr(InputError({"", "", "the request was cancelled", ""})));
  return true;
}

void HostedSampler::fail(std::exception_ptr error) {
  const auto calls = std::exchange(calls_, {});
  of_.clear();
  decoding_.reset();
  for (const auto& [ticket, call] : calls) call->done(nullptr, error);
}

}  // namespace espalier
