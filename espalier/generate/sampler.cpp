#include "espalier/generate/sampler.h"

#include "espalier/generate/generation.h"
#include "espalier/generate/whole_logits.h"

namespace espalier {
namespace generation {
namespace {

DType dtype_of(at::ScalarType type) {
  return type == at::kDouble ? DType::float64 : type == at::kFloat ? DType::float32 : DType::bfloat16;
}

// The least number of any rank, so that all admit as many responses.
std::int64_t least_of_all(const Mesh& mesh, std::int64_t bytes) {
  return static_cast<std::int64_t>(-maxima_over_ranks(mesh.world, {-static_cast<double>(bytes)}).front());
}

// Tokens that a response to this prompt may have. It ends at the model's positions, unless the prompt fills them.
std::int64_t longest_response(const ModelShape& shape, const Prompt& prompt, const SamplingSettings& settings) {
  const std::int64_t most = settings.max_response_length - prompt.observed;
  const std::int64_t left = shape.max_positions - static_cast<std::int64_t>(prompt.ids.size());
  return left > 0 ? std::min(most, left) : most;
}

void check_settings(const SamplingSettings& s) {
  const auto require = [](bool fine, const char* option, const char* expected, double got) {
    if (!fine) throw OptionError({option, expected, text_of(got), ""});
  };
  require(s.n >= 1, "--n", "at least 1", static_cast<double>(s.n));
  require(s.temperature >= 0 && std::isfinite(s.temperature), "--temperature", "a number, at least 0", s.temperature);
  require(s.top_p > 0 && s.top_p <= 1, "--top-p", "a number in (0, 1]", s.top_p);
  require(s.max_response_length >= 1, "--max-response-length", "at least 1",
          static_cast<double>(s.max_response_length));
}

void check_prompt(const ModelShape& shape, const Prompt& prompt, const SamplingSettings& settings) {
  if (prompt.ids.empty()) throw InputError({prompt.where + ": prompt_ids", "at least one token", "an empty list", ""});
  if (prompt.observed >= settings.max_response_length)
    throw InputError({prompt.where,
                      text_of("a first observation of fewer than ", settings.max_response_length, " tokens"),
                      text_of(prompt.observed), "raise --max-response-length, or let reset return less"});
  for (const std::int32_t id : prompt.ids)
    if (id < 0 || id >= shape.vocabulary)
      throw InputError({prompt.where + ": prompt_ids", text_of("token ids in [0, ", shape.vocabulary, ")"), text_of(id),
                        "Was this prompt made with another tokenizer or model?"});
}

bool ends_with_stop_id(const Rollout& rollout, const SamplingSettings& settings) {
  return std::ranges::find(settings.stop_ids, rollout.response_ids.back()) != settings.stop_ids.end();
}

}  // namespace

Generation::Generation(const Decoder& decoder, std::span<const Prompt> prompts, const SamplingSettings& settings,
                       Arena& arena, Progress& progress)
    : decoder_(decoder),
      settings_(settings),
      rule_{settings.temperature, settings.top_k, settings.top_p},
      keeps_sets_(settings.kept_sets && settings.temperature > 0 &&
                  !rule_.keeps_all(decoder.local().whole().vocabulary)),
      arena_(arena),
      progress_(progress),
      kv_bytes_(kv_bytes_per_token(decoder.shape(), dtype_of(decoder.dtype()))),
      state_bytes_(StateBuffers(decoder.sizes(), false).peak()),
      kv_limit_(least_of_all(
          decoder.mesh(), settings.kv_limit_bytes > 0 ? settings.kv_limit_bytes : decoder.device().free_bytes() / 2)),
      most_at_once_(settings.max_num_seqs > 0 ? settings.max_num_seqs : kMostDecoded) {
  check_settings(settings);
  for (const Prompt& prompt : prompts) check_prompt(decoder.local().whole(), prompt, settings);
  ESPALIER_INTERNAL(positions_needed(decoder.shape(), prompts, settings) <= decoder.positions(), "rotary tables of ",
                    decoder.positions(), " positions");
  make_results(prompts);
  make_prompts(prompts);
  keep_own_prompts();
}

void Generation::make_results(std::span<const Prompt> prompts) {
  results_.reserve(prompts.size() * static_cast<std::size_t>(settings_.n));
  for (std::size_t p = 0; p < prompts.size(); ++p)
    for (std::int64_t r = 0; r < settings_.n; ++r) {
      report_.prompt_rows_logical += static_cast<std::int64_t>(prompts[p].ids.size());
      Rollout rollout;
      rollout.prompt_ids = prompts[p].ids;
      rollout.group = prompts[p].group.empty() ? std::to_string(p) : prompts[p].group;
      rollout.carried = prompts[p].carried;
      rollout.temperature = settings_.temperature > 0 ? settings_.temperature : 1;
      rollout.index = static_cast<std::int64_t>(results_.size());
      rollout.where = prompts[p].where;
      results_.push_back(std::move(rollout));
    }
}

void Generation::make_prompts(std::span<const Prompt> prompts) {
  std::map<std::pair<std::int64_t, std::vector<std::int32_t>>, PromptState*> known;
  const auto add = [&](const Prompt& prompt) {
    prompts_.push_back(std::make_unique<PromptState>());
    PromptState& state = *prompts_.back();
    state.ids = prompt.ids;
    state.where = prompt.where, state.dp_rank = prompt.dp_rank;
    state.longest = longest_response(decoder_.shape(), prompt, settings_);
    return &state;
  };
  const Random random(settings_.seed);
  responses_.reserve(results_.size());
  for (std::size_t p = 0; p < prompts.size(); ++p) {
    for (std::int64_t r = 0; r < settings_.n; ++r) {
      PromptState*& state = known[{prompts[p].dp_rank, prompts[p].ids}];
      if (!state || !settings_.share_prompts) state = add(prompts[p]);
      state->responses.push_back(static_cast<std::int64_t>(responses_.size()));
      const std::int64_t limit = state->prompt_rows() + longest_response(decoder_.shape(), prompts[p], settings_);
      responses_.push_back(
          {.state = state, .random = random.fork(p).fork(static_cast<std::uint64_t>(r)), .limit = limit});
    }
  }
  for (const auto& state : prompts_) {
    const std::int64_t rows = std::max<std::int64_t>(1, state->longest - 1);
    state->places = std::min({static_cast<std::int64_t>(state->responses.size()), most_at_once_,
                              std::max<std::int64_t>(1, kv_limit_ / (rows * kv_bytes_ + state_bytes_)),
                              std::numeric_limits<std::int32_t>::max() / rows});
  }
}

Generated Generation::run() {
  const at::AutoDispatchBelowADInplaceOrView unrecorded;  // as the passes of a step
  const std::shared_ptr<void> held = hold_weights(decoder_);
  std::int64_t responses = 0;
  for (const auto& state : prompts_) {
    prompt_rows_ += state->prompt_rows();
    responses += state->longest * static_cast<std::int64_t>(state->responses.size());
  }
  progress_.begin("generating", prompt_rows_ + responses, "tokens");
  const Timer timer;
  while (!failure_ && (next_prompt_ < prompts_.size() || live_ > 0 || !moved_.empty())) {
    admit();
    if (anything_runs()) step();
    if (settings_.turns) exchange_turns();
  }
  if (failure_) cut_unfinished();
  while (somebody_runs(false)) join_decoder_forward(decoder_, arena_);
  progress_.end();
  report_.seconds_decode = timer.total() - report_.seconds_prompt;
  gather_results();
  report_.kept_sets = keeps_sets_;
  report_.responses = static_cast<std::int64_t>(results_.size());
  report_.prompts = report_.responses / settings_.n;
  Generated out{{}, {}, report_, std::move(failure_)};
  std::vector<std::vector<Rollout>> records = all_records();
  for (std::size_t i = 0; i < records.size(); ++i)
    for (Rollout& record : records[i]) {
      if (record.kept_sets.ids.empty()) record.kept_sets = {}, record.full_logprobs.clear();
      record.index = static_cast<std::int64_t>(out.rollouts.size());
      out.rollouts.push_back(std::move(record));
      out.trajectory.push_back(static_cast<std::int64_t>(i));
    }
  return out;
}

// Keys and values that a prompt with so many live responses may come to hold. Rows of finished responses are used
// again by those that live, but what was touched stays until the last one ends.
std::int64_t Generation::promised_bytes(const PromptState& state, std::int64_t live) const {
  const std::int64_t longest = state.prompt_rows() + live * (state.longest - 1);
  return kv_bytes_ * std::max(longest, state.group ? state.group->held_rows() : 0) + state_bytes_ * (1 + live);
}

// Gives places to waiting responses, in order, while there is memory for their longest.
void Generation::admit() {
  std::int64_t promised = 0;
  for (const PromptState* state : open_) promised += promised_bytes(*state, state->live());
  std::vector<PromptState*> opened;
  const bool all_moved = admit_moved(promised, opened);
  while (all_moved && next_prompt_ < prompts_.size() && live_ < most_at_once_) {
    PromptState& state = *prompts_[next_prompt_];
    if (state.live() == state.places) break;
    const std::int64_t before = state.group ? promised_bytes(state, state.live()) : 0;
    const std::int64_t more = promised_bytes(state, state.live() + 1) - before;
    if (promised + more > kv_limit_) {
      if (live_ > 0) break;
      throw MemoryBudgetError({state.where, text_of("keys and values of one response within ", format_bytes(kv_limit_)),
                               text_of(format_bytes(more), " for ", state.prompt_rows(), " prompt tokens and ",
                                       state.longest, " of the response"),
                               "lower --max-response-length or raise --memory-budget"});
    }
    if (!state.group) {
      open(state);
      opened.push_back(&state);
    }
    fresh_.push_back(state.responses[state.admitted]);
    if (++state.admitted == state.responses.size()) ++next_prompt_;
    promised += more;
    ++live_;
  }
  compute_prompts(opened);
}

// Trajectories with a new history, before any response begins. False where one still waits.
bool Generation::admit_moved(std::int64_t& promised, std::vector<PromptState*>& opened) {
  for (; !moved_.empty(); moved_.pop_front()) {
    PromptState& state = *moved_.front();
    const std::int64_t more = promised_bytes(state, 1);
    if (promised + more > kv_limit_) {
      if (live_ > 0) return false;
      throw MemoryBudgetError({state.where, text_of("keys and values of one response within ", format_bytes(kv_limit_)),
                               text_of(format_bytes(more), " for a history of ", state.prompt_rows(), " tokens and ",
                                       state.longest, " more"),
                               "lower --max-response-length or raise --memory-budget"});
    }
    open(state);
    opened.push_back(&state);
    fresh_.push_back(state.responses.front());
    state.admitted = 1;
    promised += more;
    ++live_;
  }
  return true;
}

void Generation::open(PromptState& state) {
  state.group = std::make_unique<PromptGroup>(decoder_.shape(), decoder_.dtype(), state.prompt_rows(), state.places,
                                              state.longest - 1, decoder_.device());
  open_.push_back(&state);
}

// Prompts end to end in sets of rows; a long one is cut over several sets.
void Generation::compute_prompts(std::span<PromptState* const> opened) {
  const Timer timer;
  const std::int64_t budget = settings_.token_budget > 0 ? settings_.token_budget : kMostPromptRows;
  AppendedRows rows;
  ModelInput& input = rows.input;
  std::vector<PromptState*> ends;  // whose last row is among the rows
  for (PromptState* state : opened) {
    for (std::int64_t begin = 0; begin < state->prompt_rows();) {
      const std::int64_t end = std::min(state->prompt_rows(), begin + budget - input.rows());
      rows.kv.add(state->group->append_prompt(begin, end));
      for (; begin < end; ++begin) {
        input.id.push_back(state->ids[static_cast<std::size_t>(begin)]);
        input.position.push_back(static_cast<std::int32_t>(begin));
      }
      if (end == state->prompt_rows()) {
        input.output_row.push_back(static_cast<std::int32_t>(input.rows() - 1));
        input.output_position.push_back(input.position.back());
        ends.push_back(state);
      }
      if (input.rows() == budget) compute_prompt_rows(rows, ends);
    }
  }
  compute_prompt_rows(rows, ends);
  report_.seconds_prompt += timer.total();
}

void Generation::compute_prompt_rows(AppendedRows& rows, std::vector<PromptState*>& ends) {
  const std::int64_t count = rows.input.rows();
  if (count == 0) return;
  const ArenaScope scope(arena_);
  const at::Tensor normed_OM = forward(rows);
  for (std::size_t i = 0; i < ends.size(); ++i)
    decoder_.device().operations().convert(normed_OM.select(0, static_cast<std::int64_t>(i)),
                                           ends[i]->group->last_hidden_M());
  report_.prompt_rows_physical += count;
  progress_.part(text_of("prompts: ", format_count(report_.prompt_rows_physical), " of ", format_count(prompt_rows_),
                         " tokens computed"));
  progress_.advance_to(done_ += count);
  rows = {};
  ends.clear();
}

// The normalised hidden rows of the outputs.
at::Tensor Generation::forward(AppendedRows& rows) {
  ControlBlock block;
  rows.input.add_to(block);
  rows.kv.add_to(block, rows.input.output_row);
  block.hand_over(decoder_.device());
  somebody_runs(true);
  return decoder_forward(decoder_, {rows.input, rows.kv, arena_}).normed_OM;
}

// One token more for every live response.
void Generation::step() {
  const ArenaScope scope(arena_);
  Asked asked;
  AppendedRows rows;
  add_rows_of_step(rows, asked);
  const at::Tensor hidden_OM = hidden_of_step(rows, asked);
  const std::vector<TokenChoice> choices = hidden_OM.defined() ? choose(hidden_OM, asked) : std::vector<TokenChoice>();
  count_held();
  for (std::size_t i = 0; i < choices.size(); ++i) append(asked.response[i], choices[i]);
  const std::vector<std::uint8_t> stopped = stopped_by_text(asked.response);
  for (std::size_t i = 0; i < choices.size(); ++i) settle(asked.response[i], stopped[i] != 0);
  std::erase_if(open_, [](const PromptState* state) { return state->group == nullptr; });
  ++report_.decode_steps;
  progress_.advance_to(done_);
}

// The newest token of every response that has one, and tokens of observations: no more rows at once than of a prompt,
// where there are not more responses.
void Generation::add_rows_of_step(AppendedRows& rows, Asked& asked) {
  ModelInput& input = rows.input;
  const std::int64_t budget = settings_.token_budget > 0 ? settings_.token_budget : kMostPromptRows;
  std::int64_t spare = std::max<std::int64_t>(0, budget - (live_ - waiting_));
  for (PromptState* state : open_) {
    std::int64_t rows_of_group = 0;
    const std::span<const RowPacking::Run> runs = state->group->responses();
    for (std::size_t i = 0; i < runs.size(); ++i) {
      const Response& one = response(runs[i].owner);
      const std::int64_t more = one.waits ? 0 : std::min(one.pending, 1 + spare);
      spare -= std::max<std::int64_t>(0, more - 1);
      state->group->set_more(i, more);
      rows_of_group += more;
    }
    if (rows_of_group == 0) continue;
    rows.kv.add(state->group->append_step());
    for (const RowPacking::Run& run : runs) {
      for (std::int32_t row = run.count - run.more; row < run.count; ++row) {
        input.id.push_back(result(run.owner).response_ids[static_cast<std::size_t>(row)]);
        input.position.push_back(static_cast<std::int32_t>(state->prompt_rows() + row));
      }
      std::int64_t& pending = response(run.owner).pending;
      pending -= run.more;
      if (run.more == 0 || pending > 0) continue;
      input.output_row.push_back(static_cast<std::int32_t>(input.rows() - 1));
      input.output_position.push_back(input.position.back());
      asked.response.push_back(run.owner);
      asked.begin.push_back(static_cast<std::int32_t>(asked.response.size()));
    }
  }
}

// Hidden rows of the step, and behind them one of each prompt whose responses wait for their first token; undefined
// where the step only ran rows of observations.
at::Tensor Generation::hidden_of_step(AppendedRows& rows, Asked& asked) {
  std::vector<at::Tensor> parts;
  if (rows.input.rows() > 0) {
    const at::Tensor normed_OM = forward(rows);
    if (rows.input.outputs() > 0) parts.push_back(normed_OM);
  }
  const PromptState* last = nullptr;
  for (const std::int64_t response : fresh_) {
    PromptState* state = responses_[static_cast<std::size_t>(response)].state;
    if (state != last) {
      parts.push_back(state->group->last_hidden_M().unsqueeze(0));
      asked.begin.push_back(asked.begin.back());
    }
    asked.response.push_back(response);
    ++asked.begin.back();
    last = state;
  }
  fresh_.clear();
  if (parts.empty()) return {};
  if (parts.size() == 1) return parts.front();
  const at::Tensor hidden_OM =
      arena_.take({static_cast<std::int64_t>(asked.begin.size()) - 1, decoder_.shape().hidden}, decoder_.dtype());
  std::int64_t first = 0;
  for (const at::Tensor& part : parts) {
    decoder_.device().operations().convert(part, hidden_OM.narrow(0, first, part.size(0)));
    first += part.size(0);
  }
  return hidden_OM;
}

std::vector<TokenChoice> Generation::choose(const at::Tensor& hidden_OM, const Asked& asked) {
  Device& device = decoder_.device();
  std::vector<double> uniforms;
  for (const std::int64_t response : asked.response)
    uniforms.push_back(responses_[static_cast<std::size_t>(response)].random.uniform());
  at::Tensor begin_O1, uniform_N;
  ControlBlock block;
  block.add(asked.begin, begin_O1);
  block.add(uniforms, uniform_N);
  block.hand_over(device);
  const auto count = static_cast<std::int64_t>(uniforms.size());
  const at::Tensor drawn_2N = device.allocate({2, count}, at::kDouble);
  const auto visit = [&](std::int64_t first_row, const at::Tensor& logits_BV) {
    const std::int64_t rows = logits_BV.size(0), begin = asked.begin[static_cast<std::size_t>(first_row)];
    const std::int64_t tokens = asked.begin[static_cast<std::size_t>(first_row + rows)] - begin;
    const ArenaScope scope(arena_);
    const at::Tensor whole_BV = whole_logits(decoder_, logits_BV, arena_),
                     drawn_of_block = drawn_2N.narrow(1, begin, tokens);
    const at::Tensor kept_BW =
        keeps_sets_ ? device.allocate({rows, (whole_BV.size(1) + 31) / 32}, at::kInt) : at::Tensor();
    device.operations().choose_tokens(whole_BV, rule_, begin_O1.narrow(0, first_row, rows + 1),
                                      uniform_N.narrow(0, begin, tokens), drawn_of_block.select(0, 0),
                                      drawn_of_block.select(0, 1), kept_BW);
    if (keeps_sets_)
      kept_.add(device, whole_BV, settings_.temperature,
                std::span(asked.begin).subspan(static_cast<std::size_t>(first_row), static_cast<std::size_t>(rows) + 1),
                drawn_of_block.select(0, 0), kept_BW);
  };
  kept_ = {};
  const VocabularyPart part{decoder_.local().vocabulary().begin, decoder_.shape().vocabulary, decoder_.mesh().tp,
                            decoder_.logits(), decoder_.weights().head_low_rank};
  for_each_logits(hidden_OM, decoder_.weights().head_VM, part, visit, arena_);
  const at::Tensor on_host = device.to_host(drawn_2N);
  const auto drawn = host_values<const double>(on_host);
  std::vector<TokenChoice> choices;
  for (std::size_t i = 0; i < uniforms.size(); ++i) {
    const double full = drawn[uniforms.size() + i];
    choices.push_back({static_cast<std::int32_t>(drawn[i]), full, keeps_sets_ ? kept_.logprobs()[i] : full,
                       keeps_sets_ ? kept_.set_of(i) : std::span<const std::int32_t>{}});
  }
  return choices;
}

void Generation::append(std::int64_t index, const TokenChoice& choice) {
  Rollout& rollout = results_[static_cast<std::size_t>(index)];
  if (!std::isfinite(choice.full_logprob))
    throw InputError({rollout.where.empty() ? "the model" : rollout.where, "finite logits",
                      text_of(choice.full_logprob), "are the weights damaged, or too large for --dtype?"});
  rollout.response_ids.push_back(choice.token);
  rollout.rollout_logprobs.push_back(choice.logprob);
  rollout.loss_mask.push_back(1);
  if (keeps_sets_) {
    rollout.full_logprobs.push_back(choice.full_logprob);
    add_kept_set(rollout.kept_sets, choice.kept);
    report_.kept_ids += choice.kept.empty() ? decoder_.local().whole().vocabulary : std::ssize(choice.kept);
  }
  ++response(index).pending;
  ++report_.response_tokens;
  ++done_;
}

// 1 for each response whose newest tokens, those of its turn, complete a stop string.
std::vector<std::uint8_t> Generation::stopped_by_text(std::span<const std::int64_t> responses) {
  if (settings_.stops == nullptr || responses.empty()) return std::vector<std::uint8_t>(responses.size());
  std::vector<std::span<const std::int32_t>> tokens;
  for (const std::int64_t index : responses)
    tokens.push_back(std::span<const std::int32_t>(result(index).response_ids)
                         .subspan(static_cast<std::size_t>(response(index).turn_begin)));
  return settings_.stops->completed(tokens);
}

void Generation::settle(std::int64_t index, bool stopped_by_text) {
  const Rollout& rollout = result(index);
  const bool full = rollout.response_length() == response(index).state->longest;
  const bool stopped = stopped_by_text || ends_with_stop_id(rollout, settings_);
  if (!stopped && !full) return keep_rows(index);
  if (settings_.turns) return end_turn(index);
  finish(index, stopped ? Finish::stop : Finish::length);
}

// From now on the response has rows behind the prompt's.
void Generation::keep_rows(std::int64_t index) {
  Response& one = response(index);
  if (!one.has_run) one.state->group->add(index);
  one.has_run = true;
}

void Generation::end_turn(std::int64_t index) {
  Response& one = response(index);
  const std::vector<std::int32_t>& ids = result(index).response_ids;
  ++one.turns, ++report_.turns;
  const bool last = one.turns == settings_.most_turns || result(index).response_length() == one.state->longest;
  ended_.push_back({index, {ids.begin() + one.turn_begin, ids.end()}, last});
  one.waits = true;
  ++waiting_;
}

void Generation::finish(std::int64_t index, Finish reason) {
  Response& one = response(index);
  add_carried(result(index).carried, "finish_reason", kFinishTexts[static_cast<std::size_t>(reason)]);
  done_ += one.state->longest - result(index).response_length();
  if (one.has_run) one.state->group->remove(index);
  one.finish = reason;
  --live_;
  if (++one.state->finished == one.state->responses.size()) one.state->group.reset();
}

bool Generation::anything_runs() const { return live_ > waiting_; }

void Generation::cut_unfinished() {
  for (std::size_t i = 0; i < results_.size(); ++i) {
    if (!own_[i] || responses_[i].finish != Finish::none) continue;
    responses_[i].finish = Finish::abort;
    add_carried(results_[i].carried, "finish_reason", kFinishTexts[static_cast<std::size_t>(Finish::abort)]);
  }
}

void Generation::count_held() {
  std::int64_t shared = 0, unshared = 0, shared_states = 0, unshared_states = 0;
  for (const PromptState* state : open_) {
    shared += state->group->held_rows();
    unshared += state->group->held_rows() + state->prompt_rows() * (state->live() - 1);
    shared_states += 1 + state->live(), unshared_states += state->live();
  }
  report_.kv_bytes = std::max(report_.kv_bytes, shared * kv_bytes_ + shared_states * state_bytes_);
  report_.kv_bytes_unshared =
      std::max(report_.kv_bytes_unshared, unshared * kv_bytes_ + unshared_states * state_bytes_);
}

}  // namespace generation

std::int64_t positions_needed(const ModelShape& shape, std::span<const Prompt> prompts,
                              const SamplingSettings& settings) {
  std::int64_t longest = 0;
  for (const Prompt& prompt : prompts)
    longest = std::max(
        longest, static_cast<std::int64_t>(prompt.ids.size()) + generation::longest_response(shape, prompt, settings));
  return longest;
}

Generated generate(const Decoder& decoder, std::span<const Prompt> prompts, const SamplingSettings& settings,
                   Arena& arena, Progress& progress) {
  const ArenaScope scope(arena);
  return generation::Generation(decoder, prompts, settings, arena, progress).run();
}

}  // namespace espalier
