#include "espalier/rollout/writer.h"

#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <cmath>
#include <new>

#include "espalier/base/atomic_file.h"
#include "espalier/base/error.h"
#include "espalier/rollout/json_text.h"
#include "espalier/rollout/kept_sets.h"
#include "espalier/rollout/record_data.h"
#include "espalier/rollout/recorded_experts.h"

namespace espalier {
namespace {

class RecordText {
 public:
  explicit RecordText(const std::vector<ExtraSeries>& extras) : extras_(extras) {}

  void add_raw(std::string_view quoted_key, std::string_view value) {
    begin_field(quoted_key);
    text_ += value;
  }
  void add_double(std::string_view field, double value) {
    begin_field(json_quoted(field));
    append_finite(value);
  }
  void add_integer(std::string_view field, std::int64_t value) {
    begin_field(json_quoted(field));
    append_number(text_, value);
  }
  template <class T>
  void add_integers(std::string_view field, const std::vector<T>& values) {
    begin_field(json_quoted(field));
    text_ += '[';
    for (const T value : values) {
      append_number(text_, static_cast<std::int64_t>(value));
      text_ += ',';
    }
    close_list(values.empty());
  }
  void add_doubles(std::string_view field, std::span<const double> values, bool missing = false) {
    begin_field(json_quoted(field));
    text_ += '[';
    for (const double value : values) {
      append_finite(value, missing);
      text_ += ',';
    }
    close_list(values.empty());
  }
  bool replaced(std::string_view field) const {
    return std::any_of(extras_.begin(), extras_.end(), [&](const ExtraSeries& extra) { return extra.field == field; });
  }
  // The series of the record: left out where one is empty or an extra stands in its place.
  void add_series(const Rollout& rollout) {
    for (const SeriesRow& series : series_rows()) {
      const std::vector<double>& values = rollout.*series.values;
      if (!values.empty() && !replaced(series.name))
        add_doubles(series.name, values, series.kind == SeriesKind::sampled);
    }
  }
  void add_scalars(const Rollout& rollout, bool amounts) {
    for (const ScalarRow& row : scalar_rows()) {
      if (row.is_amount() != amounts || !row.given(rollout)) continue;
      std::visit([&](auto member) { add_value(row.name, rollout.*member); }, row.value);
    }
  }
  std::string finished() && { return std::move(text_) + '}'; }

 private:
  void add_value(std::string_view field, const std::string& json) { add_raw(json_quoted(field), json); }
  void add_value(std::string_view field, std::optional<std::int64_t> value) { add_integer(field, *value); }
  void add_value(std::string_view field, std::optional<double> value) { add_double(field, *value); }
  template <class Choice>
  void add_value(std::string_view field, std::optional<Choice> value) {
    add_raw(json_quoted(field), json_quoted(name_of(*value)));
  }
  void begin_field(std::string_view quoted_key) {
    text_ += text_.empty() ? '{' : ',';
    text_.append(quoted_key).append(":");
  }
  // `missing`: whether NaN may be there; it becomes null.
  void append_finite(double value, bool missing = false) {
    if (missing && std::isnan(value)) {
      text_ += "null";
      return;
    }
    ESPALIER_INTERNAL(std::isfinite(value), "a rollout's number is ", value);
    append_number(text_, value);
  }
  void close_list(bool empty) {
    if (empty)
      text_ += ']';
    else
      text_.back() = ']';
  }

  const std::vector<ExtraSeries>& extras_;
  std::string text_;
};

// Adds the fields that do not depend on the response.
void add_begin(RecordText& record, const Rollout& rollout) {
  if (!rollout.carried.empty()) {
    JsonMembers members(rollout.carried);
    for (std::string_view key, value; members.next(key, value);)
      if (!record.replaced(key.substr(1, key.size() - 2))) record.add_raw(key, value);
  }
  record.add_scalars(rollout, false);
  record.add_integers("prompt_ids", rollout.prompt_ids);
}

bool all_equal(const std::vector<double>& values) {
  return std::all_of(values.begin(), values.end(), [&](double value) { return value == values.front(); });
}

}  // namespace

std::string rollout_json(const Rollout& rollout, const std::vector<ExtraSeries>& extras) {
  if (rollout.pair.pair >= 0)
    throw UnsupportedError({rollout.where, "records with one response, because records are written",
                            "a pair of answers", "train, verify, plan and inspect read pairs"});
  RecordText record(extras);
  add_begin(record, rollout);
  record.add_integers("response_ids", rollout.response_ids);
  std::vector<std::uint8_t> mask = rollout.loss_mask;  // as the record gives it
  for (std::size_t t = 0; t < mask.size(); ++t)
    if (rollout.silence_of(t) != Silenced::no) mask[t] = 1;
  if (std::ranges::count(mask, 1) != rollout.response_length()) record.add_integers("loss_mask", mask);
  if (!rollout.token_rewards.empty())
    record.add_doubles("reward", rollout.token_rewards);
  else if (rollout.reward)
    record.add_double("reward", *rollout.reward);
  if (!rollout.advantages.empty()) {
    if (all_equal(rollout.advantages))
      record.add_double("advantage", rollout.advantages.front());
    else
      record.add_doubles("advantage", rollout.advantages);
  }
  if (rollout.temperature != 1) record.add_double("temperature", rollout.temperature);
  record.add_scalars(rollout, true);
  record.add_series(rollout);
  if (rollout.recorded_experts.tokens > 0)
    record.add_raw("\"routed_experts\"", recorded_experts_json(rollout.recorded_experts));
  if (!rollout.kept_sets.empty()) record.add_raw("\"kept_ids\"", kept_sets_json(rollout.kept_sets));
  for (const ExtraSeries& extra : extras) {
    ESPALIER_INTERNAL_EQ(extra.values.size(), rollout.response_ids.size(), extra.field, " of ", rollout.where);
    record.add_doubles(extra.field, extra.values);
  }
  return std::move(record).finished();
}

std::string set_json(std::span<const Rollout> answers) {
  const std::vector<ExtraSeries> none;
  RecordText record(none);
  const Rollout& first = answers.front();
  add_begin(record, first);
  if (first.temperature != 1) record.add_double("temperature", first.temperature);
  if (first.pair.score) {
    std::string list;
    for (const Rollout& answer : answers) {
      RecordText each(none);
      each.add_integers("response_ids", answer.response_ids);
      each.add_double("score", *answer.pair.score);
      list.append(list.empty() ? "[" : ",").append(std::move(each).finished());
    }
    record.add_raw("\"answers\"", list + ']');
    return std::move(record).finished();
  }
  for (const Rollout& answer : answers) {
    const std::string side = answer.pair.chosen ? "chosen" : "rejected";
    record.add_integers(side + "_ids", answer.response_ids);
    if (!answer.kept_sets.empty()) record.add_raw(json_quoted(side + "_kept_ids"), kept_sets_json(answer.kept_sets));
    if (answer.pair.ref_logprob) record.add_double("ref_" + side + "_logps", *answer.pair.ref_logprob);
  }
  if (first.pair.margin != 0) record.add_double("margin", first.pair.margin);
  return std::move(record).finished();
}

// Text on its way to the file, packed where the name asks for it.
struct RolloutSink {
  explicit RolloutSink(const std::string& path) : file(path) {}
  virtual ~RolloutSink() = default;
  virtual void put(std::string_view text, bool) { file.write(text); }

  AtomicFile file;
};

namespace {

struct GzipSink : RolloutSink {
  explicit GzipSink(const std::string& path) : RolloutSink(path) {
    constexpr int kGzip = 16 + MAX_WBITS, kLevel = 6, kMemory = 8;
    const int status = deflateInit2(&deflater, kLevel, Z_DEFLATED, kGzip, kMemory, Z_DEFAULT_STRATEGY);
    ESPALIER_INTERNAL_EQ(status, Z_OK);
  }
  GzipSink(const GzipSink&) = delete;
  GzipSink& operator=(const GzipSink&) = delete;
  ~GzipSink() override { deflateEnd(&deflater); }

  void put(std::string_view text, bool last) override {
    deflater.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
    deflater.avail_in = static_cast<uInt>(text.size());
    do {
      char packed[1 << 15];
      deflater.next_out = reinterpret_cast<Bytef*>(packed);
      deflater.avail_out = sizeof packed;
      deflate(&deflater, last ? Z_FINISH : Z_NO_FLUSH);
      file.write({packed, sizeof packed - deflater.avail_out});
    } while (deflater.avail_out == 0);
  }

  z_stream deflater{};
};

struct ZstdSink : RolloutSink {
  explicit ZstdSink(const std::string& path) : RolloutSink(path), context(ZSTD_createCCtx()) {
    if (context == nullptr) throw std::bad_alloc();
  }
  ZstdSink(const ZstdSink&) = delete;
  ZstdSink& operator=(const ZstdSink&) = delete;
  ~ZstdSink() override { ZSTD_freeCCtx(context); }

  void put(std::string_view text, bool last) override {
    ZSTD_inBuffer input{text.data(), text.size(), 0};
    std::size_t left = 0;
    do {
      char packed[1 << 15];
      ZSTD_outBuffer output{packed, sizeof packed, 0};
      left = ZSTD_compressStream2(context, &output, &input, last ? ZSTD_e_end : ZSTD_e_continue);
      ESPALIER_INTERNAL(ZSTD_isError(left) == 0, ZSTD_getErrorName(left));
      file.write({packed, output.pos});
    } while (last ? left != 0 : input.pos < input.size);
  }

  ZSTD_CCtx* context;
};

}  // namespace

RolloutWriter::RolloutWriter(const std::string& path) {
  if (path.ends_with(".gz"))
    sink_ = std::make_unique<GzipSink>(path);
  else if (path.ends_with(".zst"))
    sink_ = std::make_unique<ZstdSink>(path);
  else
    sink_ = std::make_unique<RolloutSink>(path);
}
RolloutWriter::~RolloutWriter() = default;

void RolloutWriter::write(const Rollout& rollout, const std::vector<ExtraSeries>& extras) {
  sink_->put(rollout_json(rollout, extras) + '\n', false);
}

void RolloutWriter::write_record(std::span<const Rollout> rollouts) {
  if (rollouts.front().pair.pair < 0) return write(rollouts.front());
  sink_->put(set_json(rollouts) + '\n', false);
}

void RolloutWriter::finish() {
  sink_->put({}, true);
  sink_->file.commit();
}

}  // namespace espalier
