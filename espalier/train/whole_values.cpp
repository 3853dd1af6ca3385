#include "espalier/train/whole_values.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "espalier/device/host_values.h"

namespace espalier {
namespace {

// The elements of a parameter in a range.
AdamW::Range overlap(const Parameter& parameter, const AdamW::Range& range) {
  const std::int64_t begin = std::max(range.begin, parameter.offset);
  return {begin, std::max(begin, std::min(range.end, parameter.offset + parameter.count))};
}

}  // namespace

ParameterValues whole_values(const AdamW& optimizer, const at::Tensor& part, Device& device) {
  return [&optimizer, &part, &device, whole = at::Tensor()](const Parameter& parameter) mutable -> const void* {
    Group& ranks = optimizer.shares();
    const auto own = [&](const AdamW::Range& range) {
      return device.to_host(part.narrow(0, range.begin - optimizer.own().begin, range.end - range.begin));
    };
    const bool writes = ranks.rank() == 0;
    if (const AdamW::Range all = overlap(parameter, optimizer.range_of(0)); all.end - all.begin == parameter.count) {
      if (!writes) return nullptr;
      whole = own(all);  // on a host, the part itself
      return host_bytes(whole);
    }
    if (writes) whole = at::empty({parameter.count}, part.options().device(at::kCPU));
    for (int rank = 0; rank < ranks.size(); ++rank) {
      const AdamW::Range range = overlap(parameter, optimizer.range_of(rank));
      if (range.begin == range.end || (!writes && rank != ranks.rank())) continue;
      if (!writes) {
        ranks.send(own(range), 0);
        continue;
      }
      const at::Tensor place = whole.narrow(0, range.begin - parameter.offset, range.end - range.begin);
      if (rank == 0)
        place.copy_(own(range));
      else
        ranks.receive(place, rank);
    }
    return writes ? host_bytes(whole) : nullptr;
  };
}

}  // namespace espalier
