// The requests of one training model since its last saved state, and their results, in numbered files.
//
// Requests are written before they are answered, results once they are there. After a state was saved, a new file
// begins. An old one goes when the state has all of its requests and nobody can ask for its results any more.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "espalier/serve/futures.h"
#include "espalier/serve/http.h"
#include "espalier/serve/journal.h"

namespace espalier::serve {

class RunJournal {
 public:
  // `folder` is created when the first request comes. `sync`: as Journal.
  RunJournal(std::filesystem::path folder, bool sync) : folder_(std::move(folder)), sync_(sync) {}

  // The first and the last of the requests that ran as one.
  struct Joined {
    std::int64_t first = 0, last = 0;
  };

  // Errors: WriteError.
  void add_request(std::int64_t number, const HttpRequest& request);
  void add_result(std::int64_t number, const FutureResult& result, Joined joined);

  // The state after request `number` has been saved.
  void begin_next(std::int64_t number);
  // Removes files that are not needed: see above. `held`: whether the result of a request is still kept.
  void prune(const std::function<bool(std::int64_t number)>& held);
  void remove();  // all of it

  // Records of a former server; what follows appends to the same files.
  struct Past {
    std::map<std::int64_t, HttpRequest> requests;  // by number
    std::map<std::int64_t, FutureResult> results;
    std::map<std::int64_t, Joined> joined;  // by each of the numbers
  };
  Past read();

 private:
  struct File {
    std::int64_t last_request = 0;
    std::set<std::int64_t> results;
  };
  Journal& current();
  std::filesystem::path path_of(std::int64_t file) const;

  std::filesystem::path folder_;
  bool sync_;
  std::map<std::int64_t, File> files_;  // by number, the newest last
  std::vector<Journal> open_;           // the newest; empty: none yet
  std::int64_t saved_ = -1;             // the request after which the last saved state was
};

}  // namespace espalier::serve
