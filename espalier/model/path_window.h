// The layers of a path that are in memory: the first ones always, and the layer in use; the next layer
// is fetched ahead. The rows of the last layer of a pass stay, because the next pass may begin
// there.
#pragma once

#include <cstdint>
#include <vector>

#include "espalier/model/path_keeper.h"

namespace espalier {

class PathWindow {
 public:
  // The first `layers_awake` layers stay in memory; a backward ends in `first_layer`. `keeper` must outlive this.
  PathWindow(PathKeeper& keeper, std::int64_t layers_awake, std::int64_t first_layer = 0)
      : keeper_(keeper), layers_awake_(layers_awake), first_layer_(first_layer) {}

  // Adds the next layer's members. Unless it is one of the first layers, it is put away.
  void add_layer(const std::vector<PathKeeper::Member>& members);
  // Adds a layer without rows in the path, which is never put away.
  void add_layer_without_rows() { layers_.emplace_back(); }
  bool sleeps(std::int64_t layer) const { return layers_[static_cast<std::size_t>(layer)].sleeps; }
  bool next_stays() const { return static_cast<std::int64_t>(layers_.size()) < layers_awake_; }
  // True if layers that are put away use the same buffers in turn; and if, besides, one of them has been added.
  bool keeper_has_one_place() const { return keeper_.one_place(); }
  bool shares_places() const;

  // The rows of a layer are in memory until another layer begins. All `rows` are valid afterwards, because new
  // rows are written in this forward.
  void begin_forward(std::int64_t layer, std::int64_t rows);
  // Also brings the gradients. Returns how many of the first `rows` rows have gradients; the others are new and
  // uninitialised. Afterwards the first `rows_after` rows are valid.
  std::int64_t begin_backward(std::int64_t layer, std::int64_t rows, std::int64_t rows_after);
  // After the last layer of a backward only gradients of the first layers stay in memory.
  void end_backward(std::int64_t layer);
  // Invalidates rows from this one on. If none is left, the layer in memory is put away.
  void forget_from(std::int64_t row);

 private:
  struct Layer {
    std::vector<int> values, gradients;        // the keeper's numbers
    std::int64_t rows = 0, gradient_rows = 0;  // valid rows
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
  std::int64_t awake_ = -1;        // the layer in memory besides the first ones; -1: none
  bool gradients_awake_ = false;   // its gradients are in memory, and changed
  std::int64_t changed_from_ = 0;  // the first changed row
};

}  // namespace espalier
