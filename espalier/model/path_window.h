// Which layers of a path are in memory where not all of them are: the first ones always, and of the others the one in
// use; the next one is brought ahead. Keys and values of the last layer of a pass stay, for the next one may begin
// there.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "espalier/model/path_keeper.h"

namespace espalier {

class PathWindow {
 public:
  // The first `layers_awake` layers do not sleep; a backward ends in `first_layer`. The keeper must outlive the object.
  PathWindow(PathKeeper& keeper, std::int64_t layers_awake, std::int64_t first_layer = 0)
      : keeper_(keeper), layers_awake_(layers_awake), first_layer_(first_layer) {}

  // The next layer's members, by kind: it sleeps from now on, if it is not one of the first.
  void add_layer(const std::array<PathKeeper::Member, PathKeeper::kKinds>& members);
  // A layer that keeps no rows in the path, and so never sleeps.
  void add_layer_without_rows() { layers_.emplace_back(); }
  bool sleeps(std::int64_t layer) const { return layers_[static_cast<std::size_t>(layer)].sleeps; }
  // Whether the next layer takes the places of the one before it.
  bool shares_places() const;

  // Keys and values of a layer are in memory until another layer is asked for; those of all `rows` are there
  // afterwards, for rows that are new are written in this forward.
  void begin_forward(std::int64_t layer, std::int64_t rows);
  // Their gradients, too. Returns how many of the first of `rows` rows have gradients; the others are new and
  // uninitialised. The first `rows_after` count afterwards.
  std::int64_t begin_backward(std::int64_t layer, std::int64_t rows, std::int64_t rows_after);
  // Behind the last layer of a backward no gradient stays in memory but those of the layers that do not sleep.
  void end_backward(std::int64_t layer);
  // Rows from this one on count no more. Where none does, the layer in memory sleeps, too.
  void forget_from(std::int64_t row);

 private:
  struct Layer {
    std::array<int, 2> keys_values, gradients;  // numbers of the keeper
    std::int64_t rows = 0, gradient_rows = 0;   // that count
    bool sleeps = false;
  };

  void use(std::int64_t layer, bool gradients);
  void ask_ahead(std::int64_t layer, bool gradients);
  void put_away();
  void put_gradients_away();
  Layer& at(std::int64_t layer) { return layers_[static_cast<std::size_t>(layer)]; }

  PathKeeper& keeper_;
  std::int64_t layers_awake_, first_layer_;
  std::vector<Layer> layers_;
  std::int64_t awake_ = -1;        // of those that sleep, the one in memory; -1: none
  bool gradients_awake_ = false;   // its gradients, too; they have changed
  std::int64_t changed_from_ = 0;  // row of it from which keys and values have changed
};

}  // namespace espalier
