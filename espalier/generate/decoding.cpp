#include "espalier/generate/decoding.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "espalier/base/dtype.h"
#include "espalier/base/error.h"
#include "espalier/base/units.h"
#include "espalier/device/control_block.h"
#include "espalier/device/host_values.h"
#include "espalier/generate/group_source.h"
#include "espalier/generate/kept_draws.h"
#include "espalier/generate/whole_logits.h"
#include "espalier/metrics/timer.h"
#include "espalier/model/block_buffers.h"
#include "espalier/model/decoder_pass.h"
#include "espalier/ops/operations.h"
#include "espalier/rollout/kept_sets.h"
#include "espalier/shape/path_leaves.h"

namespace espalier {
namespace {

DType dtype_of(at::ScalarType type) {
  return type == at::kDouble ? DType::float64 : type == at::kFloat ? DType::float32 : DType::bfloat16;
}

bool alike(const DecodingRules& a, const DecodingRules& b) {
  return a.choice.temperature == b.choice.temperature && a.choice.top_k == b.choice.top_k &&
         a.choice.top_p == b.choice.top_p && a.raw_logprobs == b.raw_logprobs && a.kept_sets == b.kept_sets;
}

// The temperature of the log-probs that the rules ask for.
double temperature_of_logprobs(const DecodingRules& rules) {
  return rules.raw_logprobs || rules.choice.temperature == 0 ? 1 : rules.choice.temperature;
}

// Log-probs of edges of visited logits, which a pass of training gives with the same bits.
std::vector<double> score(const at::Tensor& logits_BV, double temperature, std::span<const HeadEdge> edges,
                          Device& device) {
  HeadEdges on_device;
  ControlBlock block;
  const std::vector<double> temperatures(static_cast<std::size_t>(logits_BV.size(0)), temperature);
  on_device.add_to(block, temperatures, edges, logits_BV.size(1));
  block.hand_over(device);
  return logprobs_of_logits(logits_BV, on_device, 0, device);
}

}  // namespace

// A distinct prompt and the responses to it.
struct Decoding::Prompt {
  std::vector<std::int32_t> ids;
  std::string where;
  std::int64_t longest = 0, places = 0;  // tokens of a response; responses that may have a place at once
  std::list<std::int64_t> waiting;       // responses, in order
  std::int64_t live = 0;                 // responses with a place
  std::unique_ptr<PromptGroup> group;    // while some have one, and while it is kept
  std::vector<std::shared_ptr<PromptReading>> readings;  // until it is computed
  std::int64_t known = 0;                                // rows that were copied
  std::int64_t ready = 0;                                // rows that are there
  std::vector<std::int64_t> fresh;                       // responses with a place, until the prompt is computed
  bool first = false;                                    // came by add_first
  bool computed = false;
  std::uint64_t last_used = 0;

  std::int64_t rows() const { return static_cast<std::int64_t>(ids.size()); }
  bool unused() const { return live == 0 && waiting.empty(); }
};

struct Decoding::Response {
  Prompt* prompt;
  DecodingRules rules;
  DecodedResponse out;
  std::int64_t pending = 0;  // its newest tokens, whose rows have not been run
  std::int64_t turn_begin = 0;
  bool has_place = false, has_run = false;  // has rows in the prompt's group
  bool stopped = false;                     // ended, and neither removed nor continued
};

// A set of rows and the sequences that they append to.
struct Decoding::AppendedRows {
  ModelInput input;
  GroupSource kv;
  struct Piece {
    Prompt* prompt;
    std::int64_t first_output, outputs;  // among the outputs of the set
    std::int64_t first_row;              // of the prompt, that the first of them is
    bool last;                           // the prompt's last row is among them
  };
  std::vector<Piece> pieces;  // of prompts
};

// Responses whose next token depends on one row of hidden values: [begin[row], begin[row + 1]) of `response`.
struct Decoding::ChoiceRows {
  std::vector<std::int64_t> response;
  std::vector<std::int32_t> begin{0};

  std::int64_t rows() const { return static_cast<std::int64_t>(begin.size()) - 1; }
  std::span<const std::int64_t> of(std::int64_t row) const {
    const auto first = static_cast<std::size_t>(begin[static_cast<std::size_t>(row)]);
    return std::span(response).subspan(first,
                                       static_cast<std::size_t>(begin[static_cast<std::size_t>(row) + 1]) - first);
  }
  void add(std::span<const std::int64_t> of_row) {
    response.insert(response.end(), of_row.begin(), of_row.end());
    begin.push_back(static_cast<std::int32_t>(response.size()));
  }
};

// Tokens drawn for rows, with their log-probs over the whole vocabulary, and over their sets where these are kept.
struct Decoding::Draws {
  std::vector<TokenLogprob> tokens;
  bool keeps_sets = false;
  KeptDraws kept;
};

Decoding::Decoding(const Decoder& decoder, const DecodingLimits& limits, Arena& arena)
    : decoder_(decoder),
      limits_(limits),
      arena_(arena),
      kv_bytes_(kv_bytes_per_token(decoder.shape(), dtype_of(decoder.dtype()))),
      state_bytes_(StateBuffers(decoder.sizes(), false).peak()) {}

Decoding::~Decoding() = default;

Decoding::Response& Decoding::at(std::int64_t number) const {
  const auto found = responses_.find(number);
  ESPALIER_INTERNAL(found != responses_.end(), "response ", number);
  return *found->second;
}

const DecodedResponse& Decoding::response(std::int64_t number) const { return at(number).out; }
const DecodingRules& Decoding::rules(std::int64_t number) const { return at(number).rules; }

// An equal prompt that takes so many more responses; null: there is none.
Decoding::Prompt* Decoding::joinable(const std::vector<std::int32_t>& ids, std::int64_t responses, std::int64_t longest,
                                     bool reads) {
  if (!limits_.share_prompts) return nullptr;
  for (const auto& prompt : prompts_) {
    if (prompt->ids != ids) continue;
    if (!prompt->group) return prompt.get();
    const bool fits = longest <= prompt->longest &&
                      prompt->live + static_cast<std::int64_t>(prompt->waiting.size()) + responses <= prompt->places;
    if (fits && !reads) return prompt.get();
  }
  return nullptr;
}

std::int64_t Decoding::add(std::vector<std::int32_t> ids, std::vector<DecodingRules> responses,
                           const std::string& where, std::shared_ptr<PromptReading> reading) {
  ESPALIER_INTERNAL(!ids.empty() && !responses.empty(), where);
  const std::int64_t first = next_number_;
  std::int64_t longest = 0;
  for (const DecodingRules& rules : responses) longest = std::max(longest, rules.longest);
  Prompt* prompt = joinable(ids, std::ssize(responses), longest, reading != nullptr);
  for (DecodingRules& rules : responses) {
    if (prompt == nullptr || !limits_.share_prompts) prompt = &new_prompt(prompts_.end(), ids, where);
    prompt->longest = std::max(prompt->longest, prompt->group ? 0 : longest);
    add_response(*prompt, std::move(rules), prompt->computed || next_number_ != first);
  }
  if (reading) prompt->readings.push_back(std::move(reading));
  return first;
}

std::int64_t Decoding::add_first(std::vector<std::int32_t> ids, DecodingRules rules, const std::string& where) {
  ESPALIER_INTERNAL(!ids.empty(), where);
  const auto before = std::ranges::find_if(prompts_, [](const auto& one) { return !one->first; });
  Prompt& prompt = new_prompt(before, ids, where);
  prompt.first = true;
  prompt.longest = rules.longest;
  return add_response(prompt, std::move(rules), false);
}

Decoding::Prompt& Decoding::new_prompt(std::list<std::unique_ptr<Prompt>>::iterator before,
                                       const std::vector<std::int32_t>& ids, const std::string& where) {
  Prompt& prompt = **prompts_.insert(before, std::make_unique<Prompt>());
  prompt.ids = ids;
  prompt.where = where;
  return prompt;
}

std::int64_t Decoding::add_response(Prompt& prompt, DecodingRules rules, bool is_cached) {
  const std::int64_t number = next_number_++;
  prompt.waiting.push_back(number);
  prompt.last_used = ++clock_;
  auto response = std::make_unique<Response>();
  response->prompt = &prompt;
  response->rules = std::move(rules);
  response->out.cached_rows = is_cached ? prompt.rows() : 0;
  responses_.emplace(number, std::move(response));
  ++waiting_;
  return number;
}

// Keys and values that a prompt with so many live responses may come to hold. Rows of finished responses are used
// again by those that live, but what was touched stays until the last one ends.
std::int64_t Decoding::promised_bytes(const Prompt& prompt, std::int64_t live) const {
  const std::int64_t longest = prompt.rows() + live * (prompt.longest - 1);
  return kv_bytes_ * std::max(longest, prompt.group ? prompt.group->held_rows() : 0) + state_bytes_ * (1 + live);
}

std::int64_t Decoding::promised_bytes() const {
  std::int64_t promised = 0;
  for (const auto& prompt : prompts_)
    if (prompt->group) promised += promised_bytes(*prompt, prompt->live);
  return promised;
}

// Drops kept prompts, the longest unused first, until `bytes` fit beside what is promised to the others.
bool Decoding::make_room(std::int64_t bytes) {
  while (promised_bytes() + bytes > limits_.kv_bytes) {
    const auto oldest = oldest_unused();
    if (oldest == prompts_.end()) return false;
    prompts_.erase(oldest);
  }
  return true;
}

// The longest unused of the prompts without a response.
std::list<std::unique_ptr<Decoding::Prompt>>::iterator Decoding::oldest_unused() {
  auto oldest = prompts_.end();
  for (auto at = prompts_.begin(); at != prompts_.end(); ++at)
    if ((*at)->unused() && (oldest == prompts_.end() || (*at)->last_used < (*oldest)->last_used)) oldest = at;
  return oldest;
}

// Gives places to waiting responses, in order, while there is memory for their longest.
void Decoding::admit() {
  bool full = false;
  for (const auto& each : prompts_) {
    Prompt& prompt = *each;
    while (!prompt.waiting.empty() && !full) {
      if (held_ >= limits_.most_at_once || (prompt.group && prompt.live == prompt.places)) {
        full = true;
        break;
      }
      const std::int64_t before = prompt.group ? promised_bytes(prompt, prompt.live) : 0;
      const std::int64_t more = promised_bytes(prompt, prompt.live + 1) - before;
      if (!make_room(more)) {
        if (held_ == 0 && !limits_.may_wait)
          throw MemoryBudgetError({prompt.where,
                                   text_of("keys and values of one response within ", format_bytes(limits_.kv_bytes)),
                                   text_of(format_bytes(more), " for ", prompt.rows(), " prompt tokens and ",
                                           prompt.longest, " of the response"),
                                   "lower --max-response-length or raise --memory-budget"});
        full = true;
        break;
      }
      if (!prompt.group) {
        open(prompt);
        opened_.push_back(&prompt);
      }
      const std::int64_t number = prompt.waiting.front();
      prompt.waiting.pop_front();
      at(number).has_place = true;
      (prompt.computed ? fresh_ : prompt.fresh).push_back(number);
      ++prompt.live, ++held_, ++running_, --waiting_;
    }
    if (full) break;
  }
  compute_prompts();
}

void Decoding::open(Prompt& prompt) {
  const std::int64_t rows = std::max<std::int64_t>(1, prompt.longest - 1);
  prompt.places =
      std::min({static_cast<std::int64_t>(prompt.waiting.size()) + limits_.spare_places, limits_.most_at_once,
                std::max<std::int64_t>(1, limits_.kv_bytes / (rows * kv_bytes_ + state_bytes_)),
                std::numeric_limits<std::int32_t>::max() / rows});
  prompt.group = std::make_unique<PromptGroup>(decoder_.shape(), decoder_.dtype(), prompt.rows(), prompt.places,
                                               prompt.longest - 1, decoder_.device());
  take_known_rows(prompt);
}

// Copies the rows of what the prompt begins with from the prompt that has most of it. Its last row is computed, because
// the first token is drawn from it, and so are rows that are read.
void Decoding::take_known_rows(Prompt& prompt) {
  if (limits_.kept_prompts == 0 || !prompt.group->can_take_rows()) return;
  std::int64_t most = prompt.rows() - 1;
  for (const auto& reading : prompt.readings) {
    const bool all = reading->top > 0 || reading->draws > 0;
    most = std::min<std::int64_t>(most, all || reading->edges.empty() ? 0 : reading->edges.front().output);
  }
  const Prompt* best = nullptr;
  for (const auto& other : prompts_) {
    if (!other->computed || !other->group || other.get() == &prompt) continue;
    const std::int64_t end = std::min(most, other->rows());
    const auto differ = std::mismatch(prompt.ids.begin(), prompt.ids.begin() + end, other->ids.begin());
    if (const std::int64_t common = differ.first - prompt.ids.begin(); common > prompt.known)
      prompt.known = common, best = other.get();
  }
  if (best != nullptr) prompt.group->take_rows(*best->group, prompt.known);
  prompt.ready = prompt.known;
}

// Prompts end to end in sets of rows; a long one is cut over several sets, and over steps where a step has a limit.
void Decoding::compute_prompts() {
  if (opened_.empty()) return;
  const Timer timer;
  std::int64_t left = limits_.prompt_rows > 0 ? limits_.prompt_rows : std::numeric_limits<std::int64_t>::max();
  AppendedRows rows;
  ModelInput& input = rows.input;
  std::vector<Prompt*> computed;
  for (Prompt* prompt : opened_) {
    const bool read = !prompt->readings.empty();
    while (prompt->ready < prompt->rows() && left > 0) {
      std::int64_t begin = prompt->ready;
      const std::int64_t end = std::min(prompt->rows(), begin + std::min(left, limits_.token_budget - input.rows()));
      prompt->ready = end, left -= end - begin;
      rows.kv.add(prompt->group->append_prompt(begin, end));
      const bool last = end == prompt->rows();
      const std::int64_t first = read ? begin : last ? end - 1 : end;  // that is an output
      if (first < end) rows.pieces.push_back({prompt, input.outputs(), end - first, first, last});
      for (; begin < end; ++begin) {
        input.id.push_back(prompt->ids[static_cast<std::size_t>(begin)]);
        input.position.push_back(static_cast<std::int32_t>(begin));
        if (begin < first) continue;
        input.output_row.push_back(static_cast<std::int32_t>(input.rows() - 1));
        input.output_position.push_back(input.position.back());
      }
      if (input.rows() == limits_.token_budget) compute_prompt_rows(rows);
    }
    if (prompt->ready == prompt->rows()) computed.push_back(prompt);
    if (left == 0) break;
  }
  compute_prompt_rows(rows);
  for (Prompt* prompt : computed) {
    for (const std::int64_t number : prompt->fresh)
      if (at(number).out.cached_rows == 0) at(number).out.cached_rows = prompt->known;
    fresh_.insert(fresh_.end(), prompt->fresh.begin(), prompt->fresh.end());
    prompt->fresh.clear();
    prompt->readings.clear();
    prompt->computed = true;
    std::erase(opened_, prompt);
  }
  counts_.seconds_prompt += timer.total();
}

void Decoding::compute_prompt_rows(AppendedRows& rows) {
  const std::int64_t count = rows.input.rows();
  if (count == 0) return;
  const ArenaScope scope(arena_);
  const at::Tensor normed_OM = forward(rows);
  for (const AppendedRows::Piece& piece : rows.pieces) {
    if (piece.last)
      decoder_.device().operations().convert(normed_OM.select(0, piece.first_output + piece.outputs - 1),
                                             piece.prompt->group->last_hidden_M());
    if (!piece.prompt->readings.empty())
      read_prompt(*piece.prompt, normed_OM.narrow(0, piece.first_output, piece.outputs), piece.first_row);
  }
  counts_.prompt_rows += count;
  if (on_rows_) on_rows_(count);
  rows = {};
}

// Some rows of a prompt, from `first_row` on.
void Decoding::read_prompt(Prompt& prompt, const at::Tensor& hidden_OM, std::int64_t first_row) {
  const std::int64_t end = first_row + hidden_OM.size(0);
  for (const auto& reading : prompt.readings) {
    std::vector<HeadEdge> edges;
    for (const HeadEdge& edge : reading->edges)
      if (edge.output >= first_row && edge.output < end) {
        edges.push_back(edge);
        edges.back().output -= static_cast<std::int32_t>(first_row);
      }
    const std::vector<double> logprobs = logprobs_of(hidden_OM, edges);
    reading->logprobs.insert(reading->logprobs.end(), logprobs.begin(), logprobs.end());
    if (reading->top > 0)
      for (LikelyTokens& row : likeliest_of(hidden_OM, reading->top)) reading->likeliest.push_back(std::move(row));
    if (reading->draws == 0) continue;
    std::vector<double> uniforms;
    std::vector<std::int32_t> begin{0};
    for (std::int64_t row = 0; row < hidden_OM.size(0); ++row) {
      for (std::int64_t i = 0; i < reading->draws; ++i) uniforms.push_back(reading->random.uniform());
      begin.push_back(static_cast<std::int32_t>(uniforms.size()));
    }
    const std::vector<TokenLogprob> tokens = draw(hidden_OM, reading->draw_rule, 1, false, begin, uniforms).tokens;
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      if (i % static_cast<std::size_t>(reading->draws) == 0) reading->drawn.emplace_back();
      reading->drawn.back().push_back(tokens[i]);
    }
  }
}

// The normalised hidden rows of the outputs.
at::Tensor Decoding::forward(AppendedRows& rows) {
  ControlBlock block;
  rows.input.add_to(block);
  rows.kv.add_to(block, rows.input.output_row);
  block.hand_over(decoder_.device());
  if (before_forward_) before_forward_();
  return decoder_forward(decoder_, {rows.input, rows.kv, arena_}).normed_OM;
}

std::vector<std::int64_t> Decoding::step() {
  admit();
  if (running_ == 0) return {};
  std::vector<std::int64_t> chosen;
  {
    const ArenaScope scope(arena_);
    ChoiceRows asked;
    AppendedRows rows;
    add_rows_of_step(rows, asked);
    const at::Tensor hidden_OM = hidden_of_step(rows, asked);
    if (hidden_OM.defined()) choose(hidden_OM, asked, chosen);
    count_held();
  }
  ++counts_.decode_steps;
  if (on_tokens_) on_tokens_(std::ssize(chosen));
  return end_some(chosen);
}

// The newest token of every response that has one, and given tokens: no more rows at once than of a prompt, where there
// are not more responses.
void Decoding::add_rows_of_step(AppendedRows& rows, ChoiceRows& asked) {
  ModelInput& input = rows.input;
  std::int64_t spare = std::max<std::int64_t>(0, limits_.token_budget - running_);
  for (const auto& prompt : prompts_) {
    if (!prompt->group) continue;
    std::int64_t rows_of_group = 0;
    const std::span<const RowPacking::Run> runs = prompt->group->responses();
    for (std::size_t i = 0; i < runs.size(); ++i) {
      const Response& one = at(runs[i].owner);
      const std::int64_t more = one.stopped ? 0 : std::min(one.pending, 1 + spare);
      spare -= std::max<std::int64_t>(0, more - 1);
      prompt->group->set_more(i, more);
      rows_of_group += more;
    }
    if (rows_of_group == 0) continue;
    rows.kv.add(prompt->group->append_step());
    for (const RowPacking::Run& run : runs) {
      Response& one = at(run.owner);
      for (std::int32_t row = run.count - run.more; row < run.count; ++row) {
        input.id.push_back(one.out.tokens[static_cast<std::size_t>(row)]);
        input.position.push_back(static_cast<std::int32_t>(prompt->rows() + row));
      }
      one.pending -= run.more;
      if (run.more == 0 || one.pending > 0) continue;
      input.output_row.push_back(static_cast<std::int32_t>(input.rows() - 1));
      input.output_position.push_back(input.position.back());
      const std::int64_t owner = run.owner;
      asked.add({&owner, 1});
    }
  }
}

// Hidden rows of the step, and behind them the last row of each prompt whose responses wait for their first token, once
// for each rule; undefined where the step only ran rows of given tokens.
at::Tensor Decoding::hidden_of_step(AppendedRows& rows, ChoiceRows& asked) {
  std::vector<at::Tensor> parts;
  if (rows.input.rows() > 0) {
    const at::Tensor normed_OM = forward(rows);
    if (rows.input.outputs() > 0) parts.push_back(normed_OM);
  }
  for (std::size_t first = 0, last; first < fresh_.size(); first = last) {
    Response& one = at(fresh_[first]);
    for (last = first + 1; last < fresh_.size(); ++last)
      if (at(fresh_[last]).prompt != one.prompt || !alike(at(fresh_[last]).rules, one.rules)) break;
    parts.push_back(one.prompt->group->last_hidden_M().unsqueeze(0));
    asked.add(std::span(fresh_).subspan(first, last - first));
  }
  fresh_.clear();
  if (parts.empty()) return {};
  if (parts.size() == 1) return parts.front();
  const at::Tensor hidden_OM = arena_.take({asked.rows(), decoder_.shape().hidden}, decoder_.dtype());
  std::int64_t first = 0;
  for (const at::Tensor& part : parts) {
    decoder_.device().operations().convert(part, hidden_OM.narrow(0, first, part.size(0)));
    first += part.size(0);
  }
  return hidden_OM;
}

// Rows of one rule after each other: the operation knows one.
void Decoding::choose(const at::Tensor& hidden_OM, const ChoiceRows& asked, std::vector<std::int64_t>& chosen) {
  std::vector<std::vector<std::int32_t>> groups;  // rows of equal rules
  for (std::int32_t row = 0; row < asked.rows(); ++row) {
    const DecodingRules& rules = at(asked.of(row).front()).rules;
    const auto known = std::ranges::find_if(groups, [&](const std::vector<std::int32_t>& group) {
      return alike(at(asked.of(group.front()).front()).rules, rules);
    });
    (known == groups.end() ? groups.emplace_back() : *known).push_back(row);
  }
  if (groups.size() == 1) return choose_alike(hidden_OM, asked, chosen);
  for (const std::vector<std::int32_t>& group : groups) {
    const ArenaScope scope(arena_);
    ChoiceRows part;
    for (const std::int32_t row : group) part.add(asked.of(row));
    at::Tensor row_R;
    ControlBlock block;
    block.add(group, row_R);
    block.hand_over(decoder_.device());
    const at::Tensor rows_RM = arena_.take({std::ssize(group), hidden_OM.size(1)}, hidden_OM.scalar_type());
    decoder_.device().operations().gather(hidden_OM, row_R, rows_RM);
    choose_alike(rows_RM, part, chosen);
  }
}

void Decoding::choose_alike(const at::Tensor& hidden_OM, const ChoiceRows& rows, std::vector<std::int64_t>& chosen) {
  std::vector<double> uniforms;
  for (const std::int64_t number : rows.response) uniforms.push_back(at(number).rules.random.uniform());
  const DecodingRules& rules = at(rows.response.front()).rules;
  const Draws draws =
      draw(hidden_OM, rules.choice, temperature_of_logprobs(rules), rules.kept_sets, rows.begin, uniforms);
  const std::vector<TokenLogprob>& tokens = draws.tokens;
  std::vector<HeadEdge> edges;
  std::int64_t top = 0;
  for (std::int64_t row = 0, i = 0; row < rows.rows(); ++row)
    for (const std::int64_t number : rows.of(row)) {
      edges.push_back({static_cast<std::int32_t>(row), tokens[static_cast<std::size_t>(i++)].token});
      top = std::max(top, at(number).rules.top);
    }
  const std::vector<LikelyTokens> likeliest = top > 0 ? likeliest_of(hidden_OM, top) : std::vector<LikelyTokens>();
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const std::int64_t number = rows.response[i];
    append(number, draws, i);
    chosen.push_back(number);
    if (likeliest.empty()) continue;
    const LikelyTokens& row = likeliest[static_cast<std::size_t>(edges[i].output)];
    at(number).out.likeliest.push_back(row);
    at(number).out.likeliest.back().resize(std::min(row.size(), static_cast<std::size_t>(at(number).rules.top)));
  }
}

VocabularyPart Decoding::vocabulary_part() const {
  return {decoder_.local().vocabulary().begin, decoder_.shape().vocabulary, decoder_.mesh().tp, decoder_.logits(),
          decoder_.weights().head_low_rank};
}

// Tokens for rows of hidden values, with their log-probs at a temperature: [begin[row], begin[row + 1]) of the numbers
// belong to a row. The log-probs come from the operations of the head, so that training finds the same bits.
Decoding::Draws Decoding::draw(const at::Tensor& hidden_OM, const ChoiceRule& rule, double temperature, bool kept_sets,
                               const std::vector<std::int32_t>& begin, const std::vector<double>& uniforms) {
  Device& device = decoder_.device();
  at::Tensor begin_O1, uniform_N;
  ControlBlock block;
  block.add(begin, begin_O1);
  block.add(uniforms, uniform_N);
  block.hand_over(device);
  const at::Tensor drawn_2N = device.allocate({2, std::ssize(uniforms)}, at::kDouble);
  Draws out;
  out.keeps_sets = kept_sets;
  const auto visit = [&](std::int64_t first_row, const at::Tensor& logits_BV) {
    const std::int64_t rows = logits_BV.size(0), first = begin[static_cast<std::size_t>(first_row)];
    const std::int64_t tokens = begin[static_cast<std::size_t>(first_row + rows)] - first;
    const ArenaScope scope(arena_);
    const at::Tensor whole_BV = whole_logits(decoder_, logits_BV, arena_), drawn = drawn_2N.narrow(1, first, tokens);
    const at::Tensor kept_BW =
        kept_sets ? device.allocate({rows, (whole_BV.size(1) + 31) / 32}, at::kInt) : at::Tensor();
    device.operations().choose_tokens(whole_BV, rule, begin_O1.narrow(0, first_row, rows + 1),
                                      uniform_N.narrow(0, first, tokens), drawn.select(0, 0), drawn.select(0, 1),
                                      kept_BW);
    if (kept_sets)
      out.kept.add(device, whole_BV, temperature,
                   std::span(begin).subspan(static_cast<std::size_t>(first_row), static_cast<std::size_t>(rows) + 1),
                   drawn.select(0, 0), kept_BW);
    const at::Tensor on_host = device.to_host(drawn.select(0, 0));
    const auto ids = host_values<const double>(on_host);
    std::vector<HeadEdge> edges;
    for (std::int64_t row = 0; row < rows; ++row)
      for (std::int32_t n = begin[static_cast<std::size_t>(first_row + row)];
           n < begin[static_cast<std::size_t>(first_row + row + 1)]; ++n)
        edges.push_back({static_cast<std::int32_t>(row), static_cast<std::int32_t>(ids[edges.size()])});
    const std::vector<double> logprobs = score(whole_BV, temperature, edges, device);
    for (std::size_t i = 0; i < edges.size(); ++i) out.tokens.push_back({edges[i].target, logprobs[i]});
  };
  for_each_logits(hidden_OM, decoder_.weights().head_VM, vocabulary_part(), visit, arena_);
  return out;
}

// At temperature 1, as training computes them.
std::vector<double> Decoding::logprobs_of(const at::Tensor& hidden_OM, std::span<const HeadEdge> edges) {
  std::vector<double> logprob(edges.size()), entropy(edges.size());
  if (edges.empty()) return logprob;
  const ArenaScope scope(arena_);
  HeadEdges on_device;
  ControlBlock block;
  const std::vector<double> temperatures(static_cast<std::size_t>(hidden_OM.size(0)), 1.0);
  on_device.add_to(block, temperatures, edges, decoder_.local().whole().vocabulary);
  block.hand_over(decoder_.device());
  head_forward({hidden_OM, decoder_.weights().head_VM, on_device, vocabulary_part()}, logprob, entropy, arena_);
  return logprob;
}

std::vector<LikelyTokens> Decoding::likeliest_of(const at::Tensor& hidden_OM, std::int64_t count) {
  std::vector<LikelyTokens> out;
  const auto visit = [&](std::int64_t, const at::Tensor& logits_BV) {
    const ArenaScope scope(arena_);
    const at::Tensor whole_BV = whole_logits(decoder_, logits_BV, arena_),
                     on_host = decoder_.device().to_host(whole_BV);
    std::vector<std::int32_t> order(static_cast<std::size_t>(on_host.size(1)));
    const auto kept = std::min(order.size(), static_cast<std::size_t>(count));
    std::vector<HeadEdge> edges;
    const auto take = [&]<class T>(T) {
      const auto values = host_values<const T>(on_host);
      for (std::int64_t row = 0; row < on_host.size(0); ++row) {
        const auto logits = values.subspan(static_cast<std::size_t>(row) * order.size(), order.size());
        std::iota(order.begin(), order.end(), 0);
        std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(kept), order.end(),
                          [&](std::int32_t a, std::int32_t b) {
                            const T x = logits[static_cast<std::size_t>(a)], y = logits[static_cast<std::size_t>(b)];
                            return x != y ? x > y : a < b;
                          });
        for (std::size_t i = 0; i < kept; ++i) edges.push_back({static_cast<std::int32_t>(row), order[i]});
      }
    };
    on_host.scalar_type() == at::kDouble ? take(double()) : take(float());
    const std::vector<double> logprobs = score(whole_BV, 1, edges, decoder_.device());
    for (std::size_t i = 0; i < edges.size(); ++i) {
      if (i % kept == 0) out.emplace_back();
      out.back().push_back({edges[i].target, logprobs[i]});
    }
  };
  for_each_logits(hidden_OM, decoder_.weights().head_VM, vocabulary_part(), visit, arena_);
  return out;
}

void Decoding::append(std::int64_t number, const Draws& draws, std::size_t draw) {
  Response& one = at(number);
  const TokenLogprob& token = draws.tokens[draw];
  if (!std::isfinite(token.logprob))
    throw InputError({one.prompt->where.empty() ? "the model" : one.prompt->where, "finite logits",
                      text_of(token.logprob), "are the weights damaged, or too large for --dtype?"});
  one.out.tokens.push_back(token.token);
  one.out.logprobs.push_back(draws.keeps_sets ? draws.kept.logprobs()[draw] : token.logprob);
  one.out.sampled.push_back(1);
  if (draws.keeps_sets) {
    const std::span<const std::int32_t> kept = draws.kept.set_of(draw);
    one.out.full_logprobs.push_back(token.logprob);
    add_kept_set(one.out.kept_sets, kept);
    counts_.kept_ids += kept.empty() ? decoder_.local().whole().vocabulary : std::ssize(kept);
  }
  ++one.pending;
  ++counts_.sampled_tokens;
}

// Ends each response that its newest token ends. The others have rows behind the prompt's from now on.
std::vector<std::int64_t> Decoding::end_some(std::span<const std::int64_t> chosen) {
  std::map<StopStrings*, std::vector<std::int64_t>> by_text;
  for (const std::int64_t number : chosen)
    if (StopStrings* const stops = at(number).rules.stops) by_text[stops].push_back(number);
  for (const auto& [stops, numbers] : by_text) {
    std::vector<std::span<const std::int32_t>> tokens;
    for (const std::int64_t number : numbers)
      tokens.push_back(std::span<const std::int32_t>(at(number).out.tokens)
                           .subspan(static_cast<std::size_t>(at(number).turn_begin)));
    const std::vector<std::uint8_t> completed = stops->completed(tokens);
    for (std::size_t i = 0; i < numbers.size(); ++i)
      if (completed[i]) at(numbers[i]).out.end = ResponseEnd::stop;
  }
  std::vector<std::int64_t> ended;
  for (const std::int64_t number : chosen) {
    Response& one = at(number);
    if (std::ranges::find(one.rules.stop_ids, one.out.tokens.back()) != one.rules.stop_ids.end())
      one.out.end = ResponseEnd::stop;
    else if (one.out.end == ResponseEnd::none && std::ssize(one.out.tokens) == one.rules.longest)
      one.out.end = ResponseEnd::length;
    if (one.out.end != ResponseEnd::none) {
      one.stopped = true;
      --running_;
      ended.push_back(number);
    } else if (!std::exchange(one.has_run, true)) {
      one.prompt->group->add(number);
    }
  }
  return ended;
}

void Decoding::carry_on(std::int64_t number, std::span<const std::int32_t> tokens) {
  Response& one = at(number);
  ESPALIER_INTERNAL(one.stopped && std::ssize(one.out.tokens) + std::ssize(tokens) < one.rules.longest, "response ",
                    number);
  one.pending += std::ssize(tokens);
  add_given(one, tokens);
  go_on(number, one);
}

bool Decoding::restart(std::int64_t number, std::span<const std::int32_t> tokens) {
  Response& one = at(number);
  ESPALIER_INTERNAL(one.stopped && !tokens.empty() && std::ssize(tokens) < one.rules.longest, "response ", number);
  const std::vector<std::int32_t>& before = one.out.tokens;
  const auto shorter = static_cast<std::ptrdiff_t>(std::min(before.size(), tokens.size()));
  const std::int64_t common =
      std::mismatch(before.begin(), before.begin() + shorter, tokens.begin()).first - before.begin();
  const std::int64_t rows = std::min({common, std::ssize(before) - one.pending, std::ssize(tokens) - 1});
  if (one.has_run && !one.prompt->group->keep_first(number, rows)) return false;
  const std::int64_t cached = one.out.cached_rows;
  one.out = {};
  one.out.cached_rows = cached;
  one.pending = std::ssize(tokens) - rows;
  add_given(one, tokens);
  go_on(number, one);
  return true;
}

void Decoding::add_given(Response& one, std::span<const std::int32_t> tokens) {
  DecodedResponse& out = one.out;
  out.tokens.insert(out.tokens.end(), tokens.begin(), tokens.end());
  out.logprobs.resize(out.tokens.size(), 0.0);
  out.sampled.resize(out.tokens.size(), 0);
  if (one.rules.top > 0) out.likeliest.resize(out.tokens.size());
  if (!one.rules.kept_sets) return;
  out.full_logprobs.resize(out.tokens.size(), 0.0);
  for (std::size_t t = 0; t < tokens.size(); ++t) add_kept_set(out.kept_sets, {});
}

// Sampling goes on behind the tokens that the response has now.
void Decoding::go_on(std::int64_t number, Response& one) {
  one.turn_begin = std::ssize(one.out.tokens);
  one.out.end = ResponseEnd::none;
  one.stopped = false;
  ++running_;
  if (!std::exchange(one.has_run, true)) one.prompt->group->add(number);
}

void Decoding::remove(std::int64_t number) {
  Response& one = at(number);
  Prompt& prompt = *one.prompt;
  if (one.has_run) prompt.group->remove(number);
  if (one.has_place) {
    --prompt.live, --held_;
    running_ -= one.stopped ? 0 : 1;
    std::erase(fresh_, number);
    std::erase(prompt.fresh, number);
  } else {
    prompt.waiting.remove(number);
    --waiting_;
  }
  responses_.erase(number);
  close_if_unused(prompt);
}

// A prompt without responses goes, or stays for the next ones that begin with it.
void Decoding::close_if_unused(Prompt& prompt) {
  if (!prompt.unused()) return;
  prompt.last_used = ++clock_;
  if (limits_.kept_prompts == 0 || !prompt.computed) {
    std::erase(opened_, &prompt);
    prompts_.remove_if([&](const auto& one) { return one.get() == &prompt; });
    return;
  }
  const auto unused = [](const auto& one) { return one->unused(); };
  while (std::ranges::count_if(prompts_, unused) > limits_.kept_prompts) prompts_.erase(oldest_unused());
}

void Decoding::count_held() {
  std::int64_t shared = 0, unshared = 0, shared_states = 0, unshared_states = 0;
  for (const auto& prompt : prompts_) {
    if (!prompt->group) continue;
    const std::int64_t rows = prompt->group->held_rows();
    shared += rows;
    unshared += rows + prompt->rows() * (prompt->live - 1);
    shared_states += 1 + prompt->live, unshared_states += prompt->live;
  }
  counts_.kv_bytes = std::max(counts_.kv_bytes, shared * kv_bytes_ + shared_states * state_bytes_);
  counts_.kv_bytes_unshared =
      std::max(counts_.kv_bytes_unshared, unshared * kv_bytes_ + unshared_states * state_bytes_);
}

}  // namespace espalier
