#include "espalier/services/rollout_text.h"

#include "espalier/rollout/json_text.h"

namespace espalier {

Json carried_fields(const Rollout& rollout) {
  return rollout.carried.empty() ? Json::object() : Json::parse(rollout.carried);
}

void carry_text(std::string& carried, std::string_view field, const std::string& text) {
  add_carried(carried, field, json_quoted(text));
}

void add_texts(std::vector<Rollout>& rollouts, Tokenizer& tokenizer, const StopStrings* stops) {
  const auto add = [&](const char* field, std::vector<std::int32_t> Rollout::*ids, bool skip_special_tokens) {
    std::vector<Rollout*> lacking;
    std::vector<std::span<const std::int32_t>> tokens;
    for (Rollout& rollout : rollouts) {
      if (carried_fields(rollout).contains(field)) continue;
      lacking.push_back(&rollout);
      tokens.emplace_back(rollout.*ids);
    }
    const std::vector<std::string> texts = tokenizer.decode(tokens, skip_special_tokens);
    for (std::size_t i = 0; i < texts.size(); ++i)
      carry_text(lacking[i]->carried, field, stops && skip_special_tokens ? stops->before(texts[i]) : texts[i]);
  };
  add("prompt", &Rollout::prompt_ids, false);
  add("response", &Rollout::response_ids, true);
}

}  // namespace espalier
