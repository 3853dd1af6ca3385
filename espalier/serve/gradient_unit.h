// Calls of one model that run as one: their data are one forest of prefix trees.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "espalier/serve/calls.h"
#include "espalier/serve/engine_thread.h"
#include "espalier/serve/run_journal.h"

namespace espalier::serve {

class GradientUnit final : public Unit {
 public:
  struct Part {
    std::int64_t number = 0, bytes = 0;  // of the request
    std::shared_ptr<const TrainingCall> call;
  };
  using Compute = std::function<void(const std::vector<Part>& parts)>;

  // `before`: the requests that it ran with before a restart, and does again; none: it has not run. `may_join`: it may
  // run with requests that follow it.
  GradientUnit(Part part, std::optional<RunJournal::Joined> before, bool may_join, Compute compute);

  void run() override { compute_(parts_); }
  bool pauses() const override { return true; }
  bool joins(const Unit& next) const override;
  void take(std::shared_ptr<Unit> next) override;

 private:
  std::vector<Part> parts_;
  std::optional<RunJournal::Joined> before_;
  bool may_join_;
  Compute compute_;
  std::int64_t tokens_ = 0;
};

}  // namespace espalier::serve
