#include "espalier/serve/run_journal.h"

#include <algorithm>
#include <array>
#include <system_error>
#include <utility>

#include "espalier/base/json.h"
#include "espalier/serve/fields.h"

namespace espalier::serve {

namespace fs = std::filesystem;

namespace {

constexpr std::int64_t kMostJoined = 1 << 20;  // requests that ran as one
constexpr std::array kKeptHeaders{"content-type", "content-encoding"};

std::string request_head(std::int64_t number, const HttpRequest& request) {
  Json json{{"request", number}, {"path", request.path}, {"method", request.method}};
  for (const char* name : kKeptHeaders)
    if (const std::string_view value = request.header(name); !value.empty()) json[name] = value;
  return json.dump() + "\n";
}

HttpRequest read_request(const Fields& head, std::string body) {
  HttpRequest out;
  out.method = head.text("method"), out.path = head.text("path");
  for (const char* name : kKeptHeaders)
    if (head.has(name)) out.headers.emplace_back(name, head.text(name));
  out.body = std::move(body);
  return out;
}

}  // namespace

fs::path RunJournal::path_of(std::int64_t file) const { return folder_ / ("journal." + std::to_string(file)); }

Journal& RunJournal::current() {
  if (open_.empty()) {
    fs::create_directories(folder_);
    const std::int64_t file = files_.empty() ? 0 : files_.rbegin()->first;
    files_[file];
    open_.emplace_back(path_of(file), sync_);
  }
  return open_.front();
}

void RunJournal::add_request(std::int64_t number, const HttpRequest& request) {
  current().append(request_head(number, request), request.body);
  File& file = files_.rbegin()->second;
  file.last_request = std::max(file.last_request, number);
}

void RunJournal::add_result(std::int64_t number, const FutureResult& result, Joined joined) {
  const Json head{{"result", number},
                  {"protobuf", result.is_protobuf},
                  {"failed", result.failed},
                  {"first", joined.first},
                  {"last", joined.last}};
  current().append(head.dump() + "\n", *result.body);
  files_.rbegin()->second.results.insert(number);
}

void RunJournal::begin_next(std::int64_t number) {
  saved_ = std::max(saved_, number);
  if (files_.empty()) return;
  const std::int64_t next = files_.rbegin()->first + 1;
  open_.clear();
  files_[next];
}

void RunJournal::prune(const std::function<bool(std::int64_t number)>& held) {
  while (files_.size() > 1) {
    const auto& [number, file] = *files_.begin();
    if (file.last_request > saved_ || std::ranges::any_of(file.results, held)) return;
    std::error_code ignored;
    fs::remove(path_of(number), ignored);
    files_.erase(files_.begin());
  }
}

void RunJournal::remove() {
  open_.clear();
  std::error_code ignored;
  for (const auto& [number, file] : files_) fs::remove(path_of(number), ignored);
  files_.clear();
}

RunJournal::Past RunJournal::read() {
  Past past;
  std::vector<std::int64_t> numbers;
  std::error_code ignored;
  for (fs::directory_iterator at(folder_, ignored), end; at != end; at.increment(ignored)) {
    const std::string name = at->path().filename().string(),
                      number = name.substr(std::min<std::size_t>(8, name.size()));
    if (name.starts_with("journal.") && !number.empty() && number.size() < 16 &&
        number.find_first_not_of("0123456789") == number.npos)
      numbers.push_back(std::stoll(number));
  }
  std::ranges::sort(numbers);
  for (const std::int64_t number : numbers) {
    File& file = files_[number];
    for (const std::string& record : read_journal(path_of(number))) {
      const std::size_t end = std::min(record.find('\n'), record.size());
      const Fields head = Fields::of_body(record.substr(0, end));
      std::string body = record.substr(std::min(end + 1, record.size()));
      if (head.has("request")) {
        const std::int64_t of = head.integer("request", 0, INT64_MAX);
        past.requests[of] = read_request(head, std::move(body));
        file.last_request = std::max(file.last_request, of);
      } else {
        const std::int64_t of = head.integer("result", 0, INT64_MAX);
        past.results[of] = {head.flag("protobuf", false), head.flag("failed", false),
                            std::make_shared<const std::string>(std::move(body))};
        const Joined joined{head.integer("first", 0, of), head.integer("last", of, of + kMostJoined)};
        for (std::int64_t one = joined.first; one <= joined.last; ++one) past.joined[one] = joined;
        file.results.insert(of);
      }
    }
  }
  return past;
}

}  // namespace espalier::serve
