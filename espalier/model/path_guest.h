// Keeps the path's layer of the current stop in memory (model/open_path.h).
#pragma once

#include <cstdint>

#include "espalier/model/guest.h"
#include "espalier/model/open_path.h"

namespace espalier {

class PathGuest : public Guest {
 public:
  // The rows of the pass see the first `rows_above` rows of the path. The path must outlive the object.
  PathGuest(OpenPath& path, std::int64_t rows_above) : path_(path), rows_above_(rows_above) {}

  void enter(const Stop& stop) override {
    if (!stop.is_layer()) return;
    stop.pass == Pass::forward ? path_.begin_forward(stop.unit) : path_.begin_backward(stop.unit, rows_above_);
  }
  void leave(const Stop& stop) override {
    if (stop.is_layer() && stop.pass == Pass::backward) path_.end_backward(stop.unit);
  }

 protected:
  OpenPath& path_;
  std::int64_t rows_above_;
};

// For a rank without rows, while other ranks of its cp group run a wave over a sharded path.
class JoinedPath final : public PathGuest {
 public:
  explicit JoinedPath(OpenPath& path) : PathGuest(path, path.rows()) {}

  void enter(const Stop& stop) override;
};

}  // namespace espalier
