// The comparisons that every deliberate fault has to face: the suites' own, on few and small cases.
//
//   plan         every rollout's rows and edges once (program/step_plan.h: validate)
//   autograd     log-probs or values, loss and gradients of shared plans against torch autograd on a plain forward
//   repetition   the same step twice on one actor: the same bits
//   ranks        the same on two ranks with trees of their own, and an update whose state they share
//   context      the same on two ranks that divide the rows of every tree
//   sharded path the same on three ranks that divide the path, too
//   stages       the same on two ranks that divide the layers
//   layouts      the gradient and its norm on ranks that have parts of the model: heads, key/value copies, experts
//   bits         log-probs and entropies in float32: the same bits in shared plans on two threads as dense on one
//   order of sums  a product against its sums written out
//   verify       the program's own comparison of shared with dense, from files
//   adamw        the optimizer against a plain double loop
//   mini-batches advantages of a file that is cut against a plain double loop over the whole file
//   resume       a run that was stopped and continued: the same bits as one that was not
// An exception is a finding of the check that it ended; in a comparison with autograd it is called "refused".
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace espalier::testing {

struct Finding {
  std::string check, what;
};

// The first thing that each check has found wrong.
class Findings {
 public:
  void add(const std::string& check, const std::string& what);
  bool by(const std::string& check) const;
  const std::vector<Finding>& all() const { return all_; }

 private:
  std::vector<Finding> all_;
};

class Battery {
 public:
  Battery();  // computes the references and writes the files; no fault may be on
  ~Battery();
  // `begin_check` is called before each comparison; none begins once the findings are `enough`.
  Findings run(const std::function<void()>& begin_check, const std::function<bool(const Findings&)>& enough) const;

 private:
  struct Prepared;
  std::unique_ptr<Prepared> prepared_;
};

// Parts of the battery that need nothing prepared, and training from files. They add to `findings`.
void check_adamw(Findings& findings);
void check_mini_batches(Findings& findings);
void check_resume(const std::string& folder, Findings& findings);  // folder holds model/ and rollouts.jsonl

}  // namespace espalier::testing
