#include "espalier/services/python_service.h"

#include <algorithm>
#include <utility>

namespace espalier {
namespace {

constexpr int kLeastStart = 60'000;  // milliseconds for the imports of a reward file

}  // namespace

PythonService::PythonService(const std::string& service, const std::string& path, int patience, OnError on_error,
                             bool has_state)
    : service_(service), path_(path), patience_(patience), has_state_(has_state), on_error_(std::move(on_error)) {
  start();
}

void PythonService::start() {
  process_ = std::make_unique<PythonProcess>(std::vector<std::string>{"-m", "espalier.texts", service_, path_}, path_);
  const Json first = receive(std::max(patience_, kLeastStart), kNoPlace);
  if (!first.contains("ready"))
    throw InputError({path_, "the greeting of the Python process", first.dump().substr(0, 200), ""});
  ready_ = first["ready"];
}

Json PythonService::receive(int patience, std::size_t place) {
  Json answer = Json::parse(process_->receive(patience), nullptr, false);
  if (!answer.is_object())
    throw InputError({path_, "an answer of the Python process", "other data on its socket",
                      "another version of the package espalier may be on PYTHONPATH"});
  if (answer.contains("error")) on_error_(answer["error"], place);
  return answer;
}

Json PythonService::ask(const std::string& request) {
  Json out;
  ask_each(
      1, [&](std::size_t) { return request; }, [&](std::size_t, const Json& answer) { out = answer; });
  return out;
}

void PythonService::ask_each(std::size_t count, const std::function<std::string(std::size_t)>& request_from,
                             const std::function<void(std::size_t, const Json&)>& on_answer) {
  std::size_t item = 0, died_at = kNoPlace;
  while (item < count) {
    try {
      if (!process_) start();
      process_->send(request_from(item) + "\n", patience_);
      for (; item < count; ++item) on_answer(item, receive(patience_, item));
    } catch (const PythonEnded&) {
      process_.reset();
      if (std::exchange(died_at, item) == item || has_state_) throw;
    } catch (...) {
      process_.reset();  // what it still has to say belongs to a question that nobody asks any more
      throw;
    }
  }
}

}  // namespace espalier
