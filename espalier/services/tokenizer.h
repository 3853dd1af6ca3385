// A model directory's own tokenizer and chat template, in a Python process that stays (python/espalier/texts).
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "espalier/metrics/progress.h"
#include "espalier/services/python_service.h"

namespace espalier {

struct EncodedPrompt {
  std::vector<std::int32_t> ids;
  std::string text;  // of messages: as the chat template renders them
};

// An environment's reply to a turn, in the form in which it becomes tokens.
struct Observation {
  std::string content;    // JSON text: a text, or with a chat template also a message or a list of messages
  bool is_chat = false;   // the prompt was a list of messages, so the chat template is around this one, too
  std::int32_t last = 0;  // the token before it, which may be what the template ends an answer with
  std::string fields;     // template_fields of the prompt
};

// A chat after a turn of the assistant.
struct RenderedTurn {
  std::string messages;                  // before the turn: JSON text of a list
  std::span<const std::int32_t> answer;  // tokens of the turn
  std::optional<std::string> text;       // of the turn where a stop text ended it
  std::string content, fields;           // as of Observation
};

struct RenderedChat {
  std::string messages;  // behind the turn and the observation
  std::vector<std::int32_t> ids;
};

// An argument of the chat template that stands beside messages: tools, chat_template_kwargs.
bool is_template_field(std::string_view name);
// Such members of the JSON object text `carried`, as an object text; empty if there are none.
std::string template_fields(std::string_view carried);

// Messages, a JSON text, for Tokenizer::encode, with template_fields of their prompt.
std::string chat_of(std::string messages, const std::string& fields);

class Tokenizer {
 public:
  // True if `directory` holds a tokenizer's files.
  static bool is_in(const std::string& directory);

  // Errors: InputError where the directory holds none that can be read; UnsupportedError naming a Python package that
  // is missing.
  explicit Tokenizer(const std::string& directory);
  Tokenizer(const Tokenizer&) = delete;  // its service reports errors to it
  Tokenizer& operator=(const Tokenizer&) = delete;

  // Arguments of the chat template beside the messages (enable_thinking, say): `name=value,...`, a value being JSON or
  // else a text, or one JSON object. Errors: OptionError.
  void set_template_arguments(const std::string& text);

  std::int64_t vocabulary() const;          // ids are below
  std::optional<std::int32_t> eos() const;  // of the special token that ends a response
  const std::string& directory() const { return directory_; }

  // `prompts`: JSON texts, each a string, a list of chat messages, or chat_of such a list. A string gets the special
  // tokens that the tokenizer puts around texts, as Hugging Face's tokenizer(text) gives them; messages are rendered by
  // the chat template up to where the assistant answers, without further ones. `where(i)`: the place of prompt i, for
  // messages. Errors: InputError for messages without a template, and what the template raises.
  std::vector<EncodedPrompt> encode(std::span<const std::string> prompts,
                                    const std::function<std::string(std::size_t)>& where,
                                    const std::function<void(std::size_t done)>& on_progress = {});

  // The tokens of observations. A text is taken as it is, without special tokens around it. In a chat it is a message
  // of the user: the tokens are what the chat template has behind an assistant's answer, up to where the assistant
  // answers again, without the end of the answer where `last` is that. Messages may begin with one of the assistant:
  // the answer as a message. Errors: as of encode.
  std::vector<std::vector<std::int32_t>> encode_observations(std::span<const Observation> observations,
                                                             const std::function<std::string(std::size_t)>& where);

  // Chats rendered whole, up to where the assistant answers again. A turn becomes a message by the tokenizer's
  // parse_response where it has a response template, else with its text as the content. Errors: as of encode.
  std::vector<RenderedChat> render(std::span<const RenderedTurn> turns,
                                   const std::function<std::string(std::size_t)>& where);

  // Bytes that are no UTF-8 become U+FFFD, as in Hugging Face's decode.
  std::vector<std::string> decode(std::span<const std::span<const std::int32_t>> ids, bool skip_special_tokens);

 private:
  [[noreturn]] void fail(const Json& error) const;

  std::string directory_, template_arguments_ = "{}";
  std::function<std::string(std::size_t)> where_;  // of the prompts that are being encoded
  std::size_t first_ = 0;                          // of those that were asked for at once
  PythonService service_;
};

// A model's tokenizer, started when it is first needed.
class LazyTokenizer {
 public:
  explicit LazyTokenizer(std::string directory, std::string template_arguments = "")
      : directory_(std::move(directory)), template_arguments_(std::move(template_arguments)) {}

  Tokenizer& get();  // Errors: as Tokenizer
  // The same for what is merely nicer with text: null where the directory holds none, and, with a note, where it cannot
  // be read.
  Tokenizer* at_hand(Progress& progress);

 private:
  std::string directory_, template_arguments_;
  std::optional<Tokenizer> tokenizer_;
};

}  // namespace espalier
