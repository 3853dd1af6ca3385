#include "espalier/model/path_window.h"

#include <algorithm>
#include <utility>

namespace espalier {

void PathWindow::add_layer(const std::vector<PathKeeper::Member>& members) {
  const bool stays = next_stays();
  Layer& layer = layers_.emplace_back();
  if (stays) return;
  layer.sleeps = true;
  for (const PathKeeper::Member& member : members)
    (member.is_gradient() ? layer.gradients : layer.values).push_back(keeper_.add(member));
}

bool PathWindow::shares_places() const { return keeper_.one_place() && std::ranges::any_of(layers_, &Layer::sleeps); }

void PathWindow::begin_forward(std::int64_t layer, std::int64_t rows) {
  if (sleeps(layer)) {
    use(layer, false);
    changed_from_ = std::min(changed_from_, at(layer).rows);
    at(layer).rows = rows;
  }
  ask_ahead(layer + 1, false);
}

std::int64_t PathWindow::begin_backward(std::int64_t layer, std::int64_t rows, std::int64_t rows_after) {
  std::int64_t there = rows;
  if (sleeps(layer)) {
    use(layer, true);
    there = std::exchange(at(layer).gradient_rows, rows_after);
  }
  if (layer > first_layer_) ask_ahead(layer - 1, true);
  return there;
}

void PathWindow::use(std::int64_t number, bool gradients) {
  const Layer& layer = at(number);
  if (awake_ != number) {
    put_away();
    awake_ = number, changed_from_ = layer.rows;
    for (const int member : layer.values) keeper_.bring_back(member, layer.rows);
  }
  if (!gradients || gradients_awake_) return;
  gradients_awake_ = true;
  for (const int member : layer.gradients) keeper_.bring_back(member, layer.gradient_rows);
}

void PathWindow::ask_ahead(std::int64_t number, bool gradients) {
  if (number < 0 || number >= static_cast<std::int64_t>(layers_.size()) || !sleeps(number) || number == awake_) return;
  const Layer& layer = at(number);
  for (const int member : layer.values) keeper_.ask(member, layer.rows);
  if (!gradients) return;
  for (const int member : layer.gradients) keeper_.ask(member, layer.gradient_rows);
}

void PathWindow::end_backward(std::int64_t layer) {
  if (layer == first_layer_) put_gradients_away();
}

void PathWindow::put_gradients_away() {
  if (!gradients_awake_) return;
  const Layer& layer = at(awake_);
  for (const int member : layer.gradients) keeper_.put_away(member, 0, layer.gradient_rows);
  gradients_awake_ = false;
}

void PathWindow::put_away() {
  if (awake_ < 0) return;
  put_gradients_away();
  const Layer& layer = at(awake_);
  for (const int member : layer.values) keeper_.put_away(member, std::min(changed_from_, layer.rows), layer.rows);
  awake_ = -1;
}

void PathWindow::forget_from(std::int64_t row) {
  for (Layer& layer : layers_)
    layer.rows = std::min(layer.rows, row), layer.gradient_rows = std::min(layer.gradient_rows, row);
  if (row == 0) put_away();  // of nothing
}

}  // namespace espalier
