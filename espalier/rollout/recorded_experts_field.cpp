#include "espalier/rollout/recorded_experts_field.h"

#include <algorithm>
#include <span>

namespace espalier {
namespace {

namespace ondemand = simdjson::ondemand;

// Reads one field; `at` names the element that an error is about.
class RecordedExpertsReader {
 public:
  RecordedExpertsReader(const RecordPlace& place, std::string_view field, RecordedExperts& out)
      : place_(place), field_(field), out_(out) {}

  void read(JsonValue value) {
    for_each(value, std::string(field_), "a list of tokens", [&](JsonValue& token, std::int32_t t) {
      ++out_.tokens;
      if (is_null(token)) return add_free();
      read_token(token, text_of(field_, "[", t, "]"));
    });
    if (std::ranges::all_of(out_.ids, [](std::uint16_t id) { return id == RecordedExperts::kFree; })) out_ = {};
  }

 private:
  template <class Visit>
  void for_each(JsonValue value, const std::string& at, const char* expected, const Visit& visit) {
    ondemand::array list;
    if (value.get_array().get(list)) throw place_.wrong(at, expected, "another JSON value");
    std::int32_t index = 0;
    for (auto element : list) {
      JsonValue item;
      if (element.get(item)) throw place_.wrong(at, expected, "a list with invalid JSON");
      visit(item, index++);
    }
  }

  std::size_t width() const { return static_cast<std::size_t>(out_.layers) * static_cast<std::size_t>(out_.chosen); }

  // Before the first record nobody knows how wide one is.
  void add_free() { out_.ids.resize(out_.ids.size() + width(), RecordedExperts::kFree); }

  // True for a token without a record in any layer. Experts of a layer are distinct, so a writer puts zeros where it
  // has nothing; zeros in some layers stay as they came (fit_recorded_experts).
  bool is_padding() const {
    return std::ranges::all_of(
        token_, [&](std::uint16_t id) { return id == RecordedExperts::kFree || (id == 0 && out_.chosen > 1); });
  }

  void read_token(JsonValue token, const std::string& at) {
    std::int32_t layers = 0;
    token_.clear();
    for_each(token, at, "a list of layers, or null", [&](JsonValue& layer, std::int32_t l) {
      ++layers;
      read_layer(layer, text_of(at, "[", l, "]"));
    });
    if (out_.ids.empty()) {
      if (token_.empty()) throw place_.wrong(at, "at least one layer", "an empty list");
      out_.layers = layers;
      out_.ids.assign(static_cast<std::size_t>(out_.tokens - 1) * width(), RecordedExperts::kFree);
    }
    if (layers != out_.layers)
      throw place_.wrong(at, text_of(out_.layers, " layers, as in the tokens before"), text_of(layers));
    if (is_padding()) return add_free();
    out_.ids.insert(out_.ids.end(), token_.begin(), token_.end());
  }

  void read_layer(JsonValue layer, const std::string& at) {
    const auto begin = static_cast<std::ptrdiff_t>(token_.size());
    for_each(layer, at, "a list of experts", [&](JsonValue& item, std::int32_t) {
      std::int64_t expert = 0;
      const bool other = item.get_int64().get(expert) != simdjson::SUCCESS;
      if (other || expert < -1 || expert >= RecordedExperts::kFree)
        throw place_.wrong(at, text_of("experts, integers in [0, ", RecordedExperts::kFree, "), or -1 throughout"),
                           other ? "another JSON value" : text_of(expert));
      token_.push_back(expert < 0 ? RecordedExperts::kFree : static_cast<std::uint16_t>(expert));
    });
    const std::span<const std::uint16_t> own = std::span(token_).subspan(static_cast<std::size_t>(begin));
    const auto missing = std::ranges::count(own, RecordedExperts::kFree);
    if (missing != 0 && missing != std::ssize(own))
      throw place_.wrong(at, "experts, or -1 for each of them where the layer was not recorded", "-1 beside experts");
    const auto chosen = static_cast<std::int32_t>(own.size());
    if (out_.chosen == 0) out_.chosen = chosen;
    if (chosen == 0 || chosen != out_.chosen)
      throw place_.wrong(at, out_.chosen == 0 ? "at least one expert" : text_of(out_.chosen, " experts, as before"),
                         text_of(chosen));
  }

  const RecordPlace& place_;
  std::string_view field_;
  RecordedExperts& out_;
  std::vector<std::uint16_t> token_;  // [layers, chosen] of the token being read
};

}  // namespace

void read_recorded_experts(JsonValue value, const RecordPlace& place, std::string_view field, RecordedExperts& out) {
  out = {};
  RecordedExpertsReader(place, field, out).read(value);
}

}  // namespace espalier
