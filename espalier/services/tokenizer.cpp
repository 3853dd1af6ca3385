#include "espalier/services/tokenizer.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <string_view>

#include "espalier/rollout/json_text.h"
#include "espalier/rollout/python_interpreter.h"

namespace espalier {
namespace {

constexpr std::size_t kAtOnce = 256;  // prompts or responses of one request
constexpr int kPatience = 300'000;    // milliseconds

}  // namespace

bool is_template_field(std::string_view name) { return name == "tools" || name == "chat_template_kwargs"; }

std::string template_fields(std::string_view carried) {
  std::string out;
  if (carried.empty()) return out;
  JsonMembers members(carried);
  for (std::string_view key, value; members.next(key, value);) {
    const std::string_view name = key.substr(1, key.size() - 2);
    if (is_template_field(name)) add_carried(out, name, value);
  }
  return out;
}

std::string chat_of(std::string messages, const std::string& fields) {
  return fields.empty() ? std::move(messages) : text_of("{\"messages\": ", messages, ", \"fields\": ", fields, "}");
}

bool Tokenizer::is_in(const std::string& directory) {
  constexpr std::array<std::string_view, 6> kFiles = {"tokenizer.json", "tokenizer.model", "vocab.json",
                                                      "vocab.txt",      "spiece.model",    "tekken.json"};
  return std::ranges::any_of(kFiles, [&](std::string_view name) {
    std::error_code absent;
    return std::filesystem::is_regular_file(std::filesystem::path(directory) / name, absent);
  });
}

Tokenizer::Tokenizer(const std::string& directory)
    : directory_(directory),
      service_("tokenizer", directory, kPatience, [this](const Json& error, std::size_t) { fail(error); }) {}

void Tokenizer::set_template_arguments(const std::string& text) {
  if (text.empty()) return;
  const auto wrong = [&](const std::string& got) {
    return OptionError({"--chat-template-kwargs", "name=value,... or a JSON object", got, "as enable_thinking=false"});
  };
  Json arguments = Json::object();
  if (text.front() == '{') {
    arguments = Json::parse(text, nullptr, false);
    if (!arguments.is_object()) throw wrong('"' + text + '"');
  } else {
    for (std::size_t begin = 0; begin < text.size();) {
      const std::size_t end = std::min(text.find(',', begin), text.size()), equals = text.find('=', begin);
      if (equals >= end || equals == begin) throw wrong('"' + text.substr(begin, end - begin) + '"');
      const std::string value = text.substr(equals + 1, end - equals - 1);
      const Json parsed = Json::parse(value, nullptr, false);
      arguments[text.substr(begin, equals - begin)] = parsed.is_discarded() ? Json(value) : parsed;
      begin = end + 1;
    }
  }
  if (arguments.contains("messages")) throw wrong("messages, which come from the prompts");
  template_arguments_ = arguments.dump();
}

std::int64_t Tokenizer::vocabulary() const { return service_.ready()["vocabulary"].get<std::int64_t>(); }

std::optional<std::int32_t> Tokenizer::eos() const {
  const Json& eos = service_.ready()["eos"];
  return eos.is_null() ? std::nullopt : std::optional(eos.get<std::int32_t>());
}

void Tokenizer::fail(const Json& error) const {
  const std::string kind = error["kind"], message = error["message"];
  if (kind == "package") {
    const std::string package = error["package"];
    throw UnsupportedError({directory_, "the Python package " + package + " in " + python_interpreter(), message,
                            python_interpreter() + " -m pip install " + package +
                                "; or set ESPALIER_PYTHON to a Python that has it; or give prompt_ids"});
  }
  if (kind == "none")
    throw InputError({directory_, "a tokenizer beside the model (tokenizer.json)", message,
                      "save the tokenizer there (tokenizer.save_pretrained), or give prompt_ids"});
  if (kind == "tokenizer") throw InputError({directory_, "a tokenizer that can be read", message, ""});
  if (kind == "template") throw InputError({directory_, "a chat template that jinja2 can read", message, ""});
  std::string where = where_(first_ + error["place"].get<std::size_t>());
  if (!where.ends_with("observation")) where += ": prompt";
  if (kind == "no_template")
    throw InputError({where, "a text, because the model has no chat template", "a list of messages",
                      "give prompts as texts, or a chat_template in " + directory_ + "/tokenizer_config.json"});
  if (kind == "template_field")
    throw InputError({where_(first_ + error["place"].get<std::size_t>()) + ": " + error["field"].get<std::string>(),
                      error["expected"].get<std::string>(), message, ""});
  if (kind == "surrogate")
    throw InputError(
        {where, "text that UTF-8 can encode", message, "Correct the escape, or write the character itself"});
  if (kind == "message") throw InputError({where, "messages, each an object with a role", message, ""});
  throw InputError({where, "messages that the chat template accepts", message, ""});
}

std::vector<EncodedPrompt> Tokenizer::encode(std::span<const std::string> prompts,
                                             const std::function<std::string(std::size_t)>& where,
                                             const std::function<void(std::size_t)>& on_progress) {
  where_ = where;
  std::vector<EncodedPrompt> out;
  for (first_ = 0; first_ < prompts.size(); first_ += kAtOnce) {
    const auto part = prompts.subspan(first_, std::min(kAtOnce, prompts.size() - first_));
    std::string request = "{\"template\": " + template_arguments_ + ", \"encode\": [";
    for (const std::string& prompt : part) request.append(&prompt == part.data() ? "" : ", ").append(prompt);
    std::ranges::replace(request, '\n', ' ');  // between tokens of JSON; in strings it is escaped
    const Json answer = service_.ask(request + "]}");
    for (const Json& encoded : answer["encoded"])
      out.push_back({encoded["ids"].get<std::vector<std::int32_t>>(), encoded["text"].get<std::string>()});
    if (on_progress) on_progress(out.size());
  }
  return out;
}

std::vector<std::vector<std::int32_t>> Tokenizer::encode_observations(
    std::span<const Observation> observations, const std::function<std::string(std::size_t)>& where) {
  where_ = [&](std::size_t i) { return where(i) + ", observation"; };
  std::vector<std::vector<std::int32_t>> out;
  for (first_ = 0; first_ < observations.size(); first_ += kAtOnce) {
    std::string request = "{\"template\": " + template_arguments_ + ", \"observe\": [";
    const auto part = observations.subspan(first_, std::min(kAtOnce, observations.size() - first_));
    for (const Observation& one : part)
      request += text_of(&one == part.data() ? "" : ", ", "{\"content\": ", one.content,
                         ", \"chat\": ", one.is_chat ? "true" : "false", ", \"last\": ", one.last,
                         ", \"fields\": ", one.fields.empty() ? "{}" : one.fields, "}");
    const Json answer = service_.ask(request + "]}");
    for (const Json& ids : answer["observed"]) out.push_back(ids.get<std::vector<std::int32_t>>());
  }
  return out;
}

std::vector<RenderedChat> Tokenizer::render(std::span<const RenderedTurn> turns,
                                            const std::function<std::string(std::size_t)>& where) {
  where_ = [&](std::size_t i) { return where(i) + ", observation"; };
  std::vector<RenderedChat> out;
  for (first_ = 0; first_ < turns.size(); first_ += kAtOnce) {
    std::string request = "{\"template\": " + template_arguments_ + ", \"render\": [";
    const auto part = turns.subspan(first_, std::min(kAtOnce, turns.size() - first_));
    for (const RenderedTurn& one : part)
      request += text_of(&one == part.data() ? "" : ", ", "{\"messages\": ", one.messages,
                         ", \"answer\": ", Json(std::vector<std::int32_t>(one.answer.begin(), one.answer.end())).dump(),
                         ", \"text\": ", one.text ? json_quoted(*one.text) : "null", ", \"content\": ", one.content,
                         ", \"fields\": ", one.fields.empty() ? "{}" : one.fields, "}");
    std::ranges::replace(request, '\n', ' ');  // between tokens of JSON; in strings it is escaped
    const Json answer = service_.ask(request + "]}");
    for (const Json& chat : answer["rendered"])
      out.push_back({chat["messages"].dump(), chat["ids"].get<std::vector<std::int32_t>>()});
  }
  return out;
}

std::vector<std::string> Tokenizer::decode(std::span<const std::span<const std::int32_t>> ids,
                                           bool skip_special_tokens) {
  std::vector<std::string> out;
  for (std::size_t first = 0; first < ids.size(); first += kAtOnce) {
    const auto part = ids.subspan(first, std::min(kAtOnce, ids.size() - first));
    std::string request = "{\"skip_special_tokens\": ";
    request.append(skip_special_tokens ? "true" : "false").append(", \"decode\": [");
    for (const auto& response : part) {
      request += &response == part.data() ? "[" : ", [";
      for (const std::int32_t& id : response) {
        if (&id != response.data()) request += ',';
        append_number(request, std::int64_t{id});
      }
      request += ']';
    }
    const Json answer = service_.ask(request + "]}");
    for (const Json& text : answer["decoded"]) out.push_back(text.get<std::string>());
  }
  return out;
}

Tokenizer& LazyTokenizer::get() {
  if (!tokenizer_) tokenizer_.emplace(directory_).set_template_arguments(template_arguments_);
  return *tokenizer_;
}

Tokenizer* LazyTokenizer::at_hand(Progress& progress) {
  if (!tokenizer_ && !Tokenizer::is_in(directory_)) return nullptr;
  try {
    return &get();
  } catch (const Error& error) {
    progress.note(std::string("continuing without text: ") + error.what());
    return nullptr;
  }
}

}  // namespace espalier
