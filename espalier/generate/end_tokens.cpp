#include "espalier/generate/end_tokens.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <string>

#include "espalier/base/error.h"
#include "espalier/base/json.h"
#include "espalier/checkpoint/json_file.h"

namespace espalier {
namespace {

// eos_token_id of one file; false where it has none.
bool read_eos(const std::filesystem::path& file, std::vector<std::int32_t>& out) {
  if (!std::filesystem::exists(file)) return false;
  const Json config = read_json_object(file);
  const auto eos = config.find("eos_token_id");
  if (eos == config.end() || eos->is_null()) return false;
  for (const Json& id : eos->is_array() ? *eos : Json::array({*eos})) {
    if (!id.is_number_integer() || id < 0 || id > std::numeric_limits<std::int32_t>::max())
      throw InputError({file.string() + ": eos_token_id", "a token id or a list of them", eos->dump(),
                        "or give the tokens that end a response with --stop-ids"});
    out.push_back(id.get<std::int32_t>());
  }
  return true;
}

// A special token is a text, or an object with its text.
std::string text_of_token(const Json& token) {
  if (token.is_string()) return token.get<std::string>();
  if (token.is_object() && token.contains("content") && token["content"].is_string())
    return token["content"].get<std::string>();
  return "";
}

// The id of a special token among those that the tokenizer's files add to its vocabulary.
std::optional<std::int32_t> added_token(const Json& config, const std::filesystem::path& model,
                                        const std::string& text) {
  if (const auto added = config.find("added_tokens_decoder"); added != config.end() && added->is_object())
    for (const auto& [id, token] : added->items())
      if (text_of_token(token) == text && id.find_first_not_of("0123456789") == id.npos && id.size() < 10)
        return std::stoi(id);
  const std::filesystem::path file = model / "tokenizer.json";
  if (!std::filesystem::exists(file)) return {};
  const Json tokenizer = read_json_object(file);
  const auto added = tokenizer.find("added_tokens");
  if (added == tokenizer.end() || !added->is_array()) return {};
  for (const Json& token : *added)
    if (token.is_object() && text_of_token(token) == text && token.contains("id") && token["id"].is_number_integer())
      return token["id"].get<std::int32_t>();
  return {};
}

}  // namespace

std::vector<std::int32_t> model_end_tokens(const std::filesystem::path& model) {
  std::vector<std::int32_t> ids;
  if (!read_eos(model / "generation_config.json", ids)) read_eos(model / "config.json", ids);
  return ids;
}

std::vector<std::int32_t> end_tokens(const std::filesystem::path& model) {
  std::vector<std::int32_t> ids = model_end_tokens(model);
  const std::filesystem::path file = model / "tokenizer_config.json";
  if (!std::filesystem::exists(file)) return ids;
  const Json config = read_json_object(file);
  const auto eos = config.find("eos_token");
  const std::string text = eos == config.end() ? "" : text_of_token(*eos);
  if (text.empty()) return ids;
  const std::optional<std::int32_t> id = added_token(config, model, text);
  if (id && std::ranges::find(ids, *id) == ids.end()) ids.push_back(*id);
  return ids;
}

}  // namespace espalier
