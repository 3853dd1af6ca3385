// Rollouts beside their text: the members `prompt` and `response` of what a record carries.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "espalier/base/json.h"
#include "espalier/rollout/rollout.h"
#include "espalier/services/stop_strings.h"
#include "espalier/services/tokenizer.h"

namespace espalier {

// The carried fields of a record, parsed; an empty object where it has none.
Json carried_fields(const Rollout& rollout);

// Adds `field`: `text` to what the record carries.
void carry_text(std::string& carried, std::string_view field, const std::string& text);

// Adds to every rollout `response`, its text without special tokens, and `prompt`, the whole text that the model saw;
// each where it carries none. With `stops` the response's text ends before the first of them.
void add_texts(std::vector<Rollout>& rollouts, Tokenizer& tokenizer, const StopStrings* stops = nullptr);

}  // namespace espalier
