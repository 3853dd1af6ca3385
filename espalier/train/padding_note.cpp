#include "espalier/train/padding_note.h"

#include <algorithm>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/checkpoint/json_file.h"

namespace espalier {
namespace fs = std::filesystem;
namespace {

// Empty where the file is absent or damaged: others report that.
Json object_in(const fs::path& file) {
  try {
    return read_json_object(file);
  } catch (const InputError&) {
    return Json::object();
  }
}

std::string text_member(const Json& object, const char* name) {
  const auto found = object.is_object() ? object.find(name) : object.end();
  return found != object.end() && found->is_string() ? found->get<std::string>() : "";
}

// A token id, or a list of them, of the whole model or of its text model.
std::vector<Json> ids_in(const Json& config, const char* member) {
  for (const Json* part : {&config, config.contains("text_config") ? &config["text_config"] : nullptr}) {
    if (part == nullptr || !part->is_object()) continue;
    const auto found = part->find(member);
    if (found == part->end() || found->is_null()) continue;
    return found->is_array() ? std::vector<Json>(found->begin(), found->end()) : std::vector<Json>{*found};
  }
  return {};
}

// "; the tokenizer pads with <pad>, 5", where that is none of `ends`.
std::string padding_of_tokenizer(const fs::path& directory, const std::vector<Json>& ends) {
  const Json settings = object_in(directory / "tokenizer_config.json");
  const Json token = settings.value("pad_token", Json());
  const std::string pad = token.is_object() ? text_member(token, "content") : text_member(settings, "pad_token");
  if (pad.empty()) return "";
  const Json tokenizer = object_in(directory / "tokenizer.json");
  Json id;
  if (const auto added = tokenizer.find("added_tokens"); added != tokenizer.end() && added->is_array())
    for (const Json& one : *added)
      if (text_member(one, "content") == pad) id = one.value("id", Json());
  if (id.is_null() || std::ranges::find(ends, id) != ends.end()) return "";
  return text_of("; the tokenizer pads with ", pad, ", ", id.dump());
}

}  // namespace

std::string padding_note(const fs::path& directory) {
  const Json config = object_in(directory / "config.json");
  const std::vector<Json> pads = ids_in(config, "pad_token_id"), ends = ids_in(config, "eos_token_id");
  if (!pads.empty() && std::ranges::find(ends, pads.front()) == ends.end()) return "";
  const std::string what =
      pads.empty() ? "config.json has no pad_token_id: transformers refuses to score a batch of several rows"
                   : text_of("pad_token_id in config.json is ", pads.front().dump(),
                             ", an end token: transformers scores padded rows of a batch one token early");
  return text_of(what, ". Set pad_token_id of the trained model to a token that no answer holds",
                 padding_of_tokenizer(directory, ends));
}

}  // namespace espalier
