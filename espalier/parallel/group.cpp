#include "espalier/parallel/group.h"

#include <ATen/ATen.h>

#include <chrono>
#include <cmath>
#include <limits>
#include <numeric>

#include "espalier/base/error.h"

namespace espalier {
namespace {

std::int64_t bytes_of(const at::Tensor& x) { return static_cast<std::int64_t>(x.nbytes()); }

void copy_values(const at::Tensor& from, const at::Tensor& to) {
  if (from.const_data_ptr() != to.const_data_ptr()) to.view(-1).copy_(from.view(-1));
}

std::int64_t sum(std::span<const std::int64_t> rows) { return std::accumulate(rows.begin(), rows.end(), 0LL); }

at::Tensor doubles(std::vector<double>& values) {
  return at::from_blob(values.data(), {static_cast<std::int64_t>(values.size())}, at::kDouble);
}

}  // namespace

void Group::add_over_ranks(const at::Tensor& x) {
  ESPALIER_INTERNAL(x.is_contiguous());
  if (alone() || x.numel() == 0) return;
  bytes_ += bytes_of(x);
  do_add(x);
}

void Group::max_over_ranks(const at::Tensor& x) {
  ESPALIER_INTERNAL(x.is_contiguous());
  if (alone() || x.numel() == 0) return;
  bytes_ += bytes_of(x);
  do_max(x);
}

void Group::gather(const at::Tensor& part, const at::Tensor& whole) {
  ESPALIER_INTERNAL(part.is_contiguous() && whole.is_contiguous() && part.scalar_type() == whole.scalar_type());
  ESPALIER_INTERNAL_EQ(part.numel() * size_, whole.numel());
  if (alone()) return copy_values(part, whole);
  if (part.numel() == 0) return;
  bytes_ += bytes_of(part);
  do_gather(part, whole);
}

void Group::scatter_sum(const at::Tensor& whole, const at::Tensor& part) {
  ESPALIER_INTERNAL(part.is_contiguous() && whole.is_contiguous() && part.scalar_type() == whole.scalar_type());
  ESPALIER_INTERNAL_EQ(part.numel() * size_, whole.numel());
  if (alone()) return copy_values(whole, part);
  if (part.numel() == 0) return;
  bytes_ += bytes_of(whole);
  do_scatter_sum(whole, part);
}

void Group::exchange(const at::Tensor& send, std::span<const std::int64_t> send_rows, const at::Tensor& receive,
                     std::span<const std::int64_t> receive_rows) {
  ESPALIER_INTERNAL(send.is_contiguous() && receive.is_contiguous() && send.scalar_type() == receive.scalar_type());
  ESPALIER_INTERNAL(send.sizes().slice(1) == receive.sizes().slice(1), "rows of one width");
  ESPALIER_INTERNAL_EQ(send_rows.size(), static_cast<std::size_t>(size_));
  ESPALIER_INTERNAL_EQ(receive_rows.size(), static_cast<std::size_t>(size_));
  ESPALIER_INTERNAL_EQ(sum(send_rows), send.size(0));
  ESPALIER_INTERNAL_EQ(sum(receive_rows), receive.size(0));
  if (alone()) return copy_values(send, receive);
  const std::int64_t rows = send.size(0);
  if (rows > 0) bytes_ += bytes_of(send) / rows * (rows - send_rows[static_cast<std::size_t>(rank_)]);
  do_exchange(send, send_rows, receive, receive_rows);
}

void Group::broadcast(const at::Tensor& x, int root) {
  ESPALIER_INTERNAL(x.is_contiguous() && root >= 0 && root < size_);
  if (alone() || x.numel() == 0) return;
  if (rank_ == root) bytes_ += bytes_of(x);
  do_broadcast(x, root);
}

void Group::send(const at::Tensor& x, int to) {
  ESPALIER_INTERNAL(x.is_contiguous() && to >= 0 && to < size_ && to != rank_);
  if (x.numel() == 0) return;
  bytes_ += bytes_of(x);
  do_send(x, to);
}

void Group::receive(const at::Tensor& x, int from) {
  ESPALIER_INTERNAL(x.is_contiguous() && from >= 0 && from < size_ && from != rank_);
  if (x.numel() == 0) return;
  const auto begin = std::chrono::steady_clock::now();
  do_receive(x, from);
  waited_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void Group::wait_for_all() {
  if (!alone()) do_add(at::zeros({1}, at::kInt));
}

std::vector<double> sums_over_ranks(Group& group, std::vector<double> values) {
  group.add_over_ranks(doubles(values));
  return values;
}

void add_over_ranks(Group& group, std::span<std::int64_t> counts) {
  group.add_over_ranks(at::from_blob(counts.data(), {static_cast<std::int64_t>(counts.size())}, at::kLong));
}

std::vector<double> maxima_over_ranks(Group& group, std::vector<double> values) {
  group.max_over_ranks(doubles(values));
  return values;
}

std::vector<double> values_of_any(Group& group, std::vector<double> values) {
  if (group.size() == 1) return values;
  constexpr double kNowhere = -std::numeric_limits<double>::infinity();
  for (double& value : values)
    if (std::isnan(value)) value = kNowhere;
  values = maxima_over_ranks(group, std::move(values));
  for (double& value : values)
    if (value == kNowhere) value = std::numeric_limits<double>::quiet_NaN();
  return values;
}

std::string text_of_rank(Group& group, const std::string& text, int root) {
  const at::Tensor size = at::full({1}, static_cast<std::int64_t>(text.size()), at::kLong);
  group.broadcast(size, root);
  std::string out = text;
  out.resize(static_cast<std::size_t>(size.item<std::int64_t>()));
  group.broadcast(at::from_blob(out.data(), {static_cast<std::int64_t>(out.size())}, at::kByte), root);
  return out;
}

std::vector<std::uint64_t> numbers_of_ranks(Group& group, std::uint64_t number) {
  std::vector<std::uint64_t> all(static_cast<std::size_t>(group.size()));
  group.gather(at::from_blob(&number, {1}, at::kLong), at::from_blob(all.data(), {group.size()}, at::kLong));
  return all;
}

}  // namespace espalier
