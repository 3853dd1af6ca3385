#include "espalier/services/environment.h"

#include "espalier/services/user_file.h"

namespace espalier {
namespace {

constexpr const char* kMethods = "a class Environment with reset(self, prompt, **fields) and step(self, text)";
constexpr const char* kStep = "step to return (observation, reward, done), with a finite reward";
constexpr const char* kObservation = "an observation: None, a text, a message, or a list of messages";

}  // namespace

Environment::Environment(const std::string& file, double timeout)
    : file_(existing_user_file(file, "class Environment", "--env")),
      service_(
          "environment", file, milliseconds(timeout),
          [this](const Json& error, std::size_t place) { fail(error, place); }, true) {}

void Environment::fail(const Json& error, std::size_t place) const {
  const std::string kind = error["kind"], message = error["message"];
  const std::string about = about_ != nullptr && place != PythonService::kNoPlace ? (*about_)(place) : "";
  if (kind == "missing") throw InputError({file_, kMethods, message, "name the class Environment"});
  if (kind == "method") throw InputError({file_, kMethods, message, "define the method"});
  fail_if_unusable(error, file_, "the environment");
  if (kind == "step" || kind == "number") throw InputError({file_, kStep, message, about});
  if (kind == "observation") throw InputError({file_, kObservation, message, about});
  throw InputError({line_of(error, file_), text_of(method_, " to return"), message, about});
}

std::vector<Json> Environment::reset(const std::vector<Json>& items, const About& about) {
  return ask("reset", items, about);
}

std::vector<Json> Environment::step(const std::vector<Json>& items, const About& about) {
  return ask("step", items, about);
}

std::vector<Json> Environment::ask(const char* method, const std::vector<Json>& items, const About& about) {
  method_ = method, about_ = &about;
  std::vector<Json> out;
  const std::string request = Json{{method, items}}.dump(-1, ' ', false, Json::error_handler_t::replace);
  try {
    service_.ask_each(
        items.size(), [&](std::size_t) { return request; },
        [&](std::size_t, const Json& answer) { out.push_back(answer); });
  } catch (const PythonEnded& end) {
    throw InputError({end.text().where, end.text().expected, end.text().got, about(out.size())});
  } catch (const PythonLate& late) {
    throw InputError({late.text().where, text_of(method, " to return in time"), late.text().got,
                      "raise --reward-timeout; it was called " + about(out.size())});
  }
  about_ = nullptr;
  return out;
}

}  // namespace espalier
