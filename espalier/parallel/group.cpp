#include "espalier/parallel/group.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "espalier/base/error.h"
#include "espalier/metrics/timer.h"

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

Pending& Pending::operator=(Pending&& other) noexcept {
  if (this == &other) return *this;
  drop();
  work_ = std::move(other.work_), event_ = std::move(other.event_);
  return *this;
}

void Pending::wait() {
  if (!work_) return;
  const std::unique_ptr<Work> work = std::move(work_);
  if (event_) event_->wanted = Timer::steady_seconds();
  work->wait();
  if (!event_) return;
  event_->ended = work->ended();
  if (event_->ended == 0) event_->ended = Timer::steady_seconds();
}

void Pending::drop() noexcept {
  try {
    wait();
  } catch (const std::exception&) {  // the next collective reports it
  }
}

std::shared_ptr<CollectiveEvent> Group::begin(std::string_view call, std::int64_t bytes, std::string of) {
  bytes_ += bytes;
  if (!log_) return nullptr;
  const double now = Timer::steady_seconds();
  const CollectiveEvent event{axis_, call, std::move(of), bytes, now, now, now};
  return log_->emplace_back(std::make_shared<CollectiveEvent>(event));
}

template <class Call>
void Group::run(std::string_view name, std::int64_t bytes, Call&& call) {
  const std::shared_ptr<CollectiveEvent> event = begin(name, bytes);
  call();
  if (event) event->ended = Timer::steady_seconds();
}

void Group::add_over_ranks(const at::Tensor& x) { start_add(x).wait(); }
void Group::gather(const at::Tensor& part, const at::Tensor& whole) { start_gather(part, whole).wait(); }
void Group::scatter_sum(const at::Tensor& whole, const at::Tensor& part) { start_scatter_sum(whole, part).wait(); }

Pending Group::start_add(const at::Tensor& x, std::string of) {
  ESPALIER_INTERNAL(x.is_contiguous());
  if (alone() || x.numel() == 0) return {};
  auto event = begin("sum", bytes_of(x), std::move(of));
  return Pending(do_start_add(x), std::move(event));
}

Pending Group::start_gather(const at::Tensor& part, const at::Tensor& whole, std::string of) {
  ESPALIER_INTERNAL(part.is_contiguous() && whole.is_contiguous() && part.scalar_type() == whole.scalar_type());
  ESPALIER_INTERNAL_EQ(part.numel() * size_, whole.numel());
  if (alone()) copy_values(part, whole);
  if (alone() || part.numel() == 0) return {};
  auto event = begin("gather", bytes_of(part), std::move(of));
  return Pending(do_start_gather(part, whole), std::move(event));
}

Pending Group::start_scatter_sum(const at::Tensor& whole, const at::Tensor& part, std::string of) {
  ESPALIER_INTERNAL(part.is_contiguous() && whole.is_contiguous() && part.scalar_type() == whole.scalar_type());
  ESPALIER_INTERNAL_EQ(part.numel() * size_, whole.numel());
  if (alone()) copy_values(whole, part);
  if (alone() || part.numel() == 0) return {};
  auto event = begin("sum and scatter", bytes_of(whole), std::move(of));
  return Pending(do_start_scatter_sum(whole, part), std::move(event));
}

void Group::max_over_ranks(const at::Tensor& x) {
  ESPALIER_INTERNAL(x.is_contiguous());
  if (alone() || x.numel() == 0) return;
  run("maximum", bytes_of(x), [&] { do_max(x); });
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
  const std::int64_t rows = send.size(0), others = rows - send_rows[static_cast<std::size_t>(rank_)];
  run("exchange", rows > 0 ? bytes_of(send) / rows * others : 0,
      [&] { do_exchange(send, send_rows, receive, receive_rows); });
}

void Group::broadcast(const at::Tensor& x, int root) {
  ESPALIER_INTERNAL(x.is_contiguous() && root >= 0 && root < size_);
  if (alone() || x.numel() == 0) return;
  run("broadcast", rank_ == root ? bytes_of(x) : 0, [&] { do_broadcast(x, root); });
}

void Group::send(const at::Tensor& x, int to) {
  ESPALIER_INTERNAL(x.is_contiguous() && to >= 0 && to < size_ && to != rank_);
  if (x.numel() == 0) return;
  run("send", bytes_of(x), [&] { do_send(x, to); });
}

void Group::receive(const at::Tensor& x, int from) {
  ESPALIER_INTERNAL(x.is_contiguous() && from >= 0 && from < size_ && from != rank_);
  if (x.numel() == 0) return;
  const double begin = Timer::steady_seconds();
  run("receive", 0, [&] { do_receive(x, from); });
  waited_ += Timer::steady_seconds() - begin;
}

void Group::wait_for_all() {
  if (!alone()) do_start_add(at::zeros({1}, at::kInt))->wait();
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
