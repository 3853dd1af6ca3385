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

// A special token of the tokenizer.
struct SpecialToken {
  std::string text;
  Json id;  // null if it is not known
};

SpecialToken special_token(const fs::path& directory, const char* name) {
  const Json settings = object_in(directory / "tokenizer_config.json");
  const Json token = settings.value(name, Json());
  SpecialToken out{token.is_object() ? text_member(token, "content") : text_member(settings, name), Json()};
  if (out.text.empty()) return out;
  const Json tokenizer = object_in(directory / "tokenizer.json");
  if (const auto added = tokenizer.find("added_tokens"); added != tokenizer.end() && added->is_array())
    for (const Json& one : *added)
      if (text_member(one, "content") == out.text) out.id = one.value("id", Json());
  return out;
}

// "; the tokenizer pads with <pad>, 5", where that is none of `ends`.
std::string padding_of_tokenizer(const fs::path& directory, const std::vector<Json>& ends) {
  const SpecialToken pad = special_token(directory, "pad_token");
  if (pad.id.is_null() || std::ranges::find(ends, pad.id) != ends.end()) return "";
  return text_of("; the tokenizer pads with ", pad.text, ", ", pad.id.dump());
}

// Why transformers' padded batches do not have the scores that were trained. Empty: they have.
std::string fault_of_padding(const std::vector<Json>& pads, const std::vector<Json>& ends) {
  if (pads.empty()) return "config.json has no pad_token_id: transformers refuses to score a batch of several rows";
  const std::string says = text_of("pad_token_id in config.json is ", pads.front().dump());
  if (pads.front().is_number() && pads.front() < 0)
    return text_of(says, ", no token: transformers scores padded rows of a batch at their padding");
  if (std::ranges::find(ends, pads.front()) == ends.end()) return "";
  return text_of(says, ", an end token: transformers scores padded rows of a batch one token early");
}

}  // namespace

std::string padding_note(const fs::path& directory) {
  const Json config = object_in(directory / "config.json");
  const std::vector<Json> pads = ids_in(config, "pad_token_id");
  std::vector<Json> ends = ids_in(config, "eos_token_id");
  if (const SpecialToken end = special_token(directory, "eos_token"); !end.id.is_null()) ends.push_back(end.id);
  const std::string what = fault_of_padding(pads, ends);
  if (what.empty()) return "";
  return text_of(what, ". Set pad_token_id of the trained model to a token that no answer holds",
                 padding_of_tokenizer(directory, ends));
}

}  // namespace espalier
