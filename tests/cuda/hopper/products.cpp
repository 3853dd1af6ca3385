// Products of warpgroups (wgmma): asynchronous readers of shared memory and registers, by descriptors of factors.
#include "tests/cuda/hopper/warpgroups.h"

namespace espalier::emulation {
namespace {

// A signaling NaN: copies keep it, and any arithmetic on it gives another number.
constexpr std::uint32_t kInFlight = 0x7f85a5a5;

void hide(float* d, int count) {
  for (int i = 0; i < count; ++i) std::memcpy(d + i, &kInFlight, 4);
}
bool is_hidden(const float* d, int count) {
  for (int i = 0; i < count; ++i)
    if (std::memcmp(d + i, &kInFlight, 4) != 0) return false;
  return true;
}

float widened_bits(std::uint16_t bits) {
  const std::uint32_t all = static_cast<std::uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &all, 4);
  return x;
}

// Where an element of a factor is, by the 64 bits that name the factor (PTX ISA, "Matrix descriptor"): bits 0..13 the
// address, 16..29 and 32..45 the two strides, each in 16 bytes; 49..51 the base of the swizzle; 62..63 the swizzle.
std::uintptr_t factor_place(std::uint64_t factor, bool columns_first, int row, int column) {
  const auto field = [&](int from) { return static_cast<std::uintptr_t>(factor >> from & 0x3fff) << 4; };
  const std::uintptr_t address = field(0), part = field(16), eight_rows = field(32);
  const auto r = static_cast<std::uintptr_t>(row), c = static_cast<std::uintptr_t>(column);
  std::uintptr_t offset = r / 8 * eight_rows + r % 8 * 128;
  offset += columns_first ? c / 64 * part + c % 64 * 2 : c * 2;  // else the 16 columns are within 128 bytes
  return swizzled(address + offset);
}

bool same(const Product& x, const Product& y) {
  return x.n == y.n && x.columns_first == y.columns_first && x.adds == y.adds && x.in_registers == y.in_registers &&
         x.a == y.a && x.b == y.b;
}

// Fields that the emulation does not read have to be 0, and the swizzle that of 128 bytes.
std::string problem_of_factor(std::uint64_t factor) {
  if (factor >> 62 != 1) return "a factor of another swizzle";
  if ((factor & ~(std::uint64_t{0x3fff} | std::uint64_t{0x3fff} << 16 | std::uint64_t{0x3fff} << 32 |
                  std::uint64_t{3} << 62)) != 0)
    return "a factor with bits that have no meaning here";
  return "";
}

}  // namespace

// Pieces of 16 bytes.
template <class Each>
bool Warpgroups::for_factor_places(const Product& p, unsigned warp_of_group, Each each) {
  bool inside = true;
  const auto piece = [&](std::uintptr_t offset) { inside = for_places(seat.shared + offset, 16, each) && inside; };
  for (int k = 0; k < 16; k += p.columns_first ? 1 : 8)
    for (int n = 0; n < p.n; n += p.columns_first ? 8 : 1)
      piece(p.columns_first ? factor_place(p.b, true, k, n) : factor_place(p.b, false, n, k));
  if (p.in_registers) return inside;
  for (int r = 0; r < 16; ++r)
    for (int k = 0; k < 16; k += 8) piece(factor_place(p.a, false, static_cast<int>(warp_of_group) * 16 + r, k));
  return inside;
}

void Warpgroups::read_factors(unsigned warp_of_group, PendingProduct& p) const {
  const auto value = [&](std::uintptr_t offset) {
    std::uint16_t bits;
    std::memcpy(&bits, seat.shared + offset, 2);
    return widened_bits(bits);
  };
  const int N = p.what.n;
  p.factor_a.resize(16 * 16), p.factor_b.resize(16 * static_cast<std::size_t>(N));
  for (int k = 0; k < 16; ++k)
    for (int n = 0; n < N; ++n)
      p.factor_b[static_cast<std::size_t>(k * N + n)] =
          value(p.what.columns_first ? factor_place(p.what.b, true, k, n) : factor_place(p.what.b, false, n, k));
  for (int r = 0; r < 16; ++r)
    for (int k = 0; k < 16; ++k) {
      float& x = p.factor_a[static_cast<std::size_t>(r * 16 + k)];
      if (!p.what.in_registers) {
        x = value(factor_place(p.what.a, false, static_cast<int>(warp_of_group) * 16 + r, k));
        continue;
      }
      const auto lane = static_cast<std::size_t>(r % 8 * 4 + k % 8 / 2);
      const unsigned two = p.a[lane][static_cast<std::size_t>(r / 8 + k / 8 * 2)];
      x = widened_bits(static_cast<std::uint16_t>(k % 2 == 0 ? two : two >> 16));
    }
}

// The result of a product whose wait has come. Returns a problem.
std::string Warpgroups::finish_product(unsigned warp, PendingProduct& p) {
  WarpProducts& of_warp = products[warp];
  Accumulators& acc = of_warp.in_flight.at(p.key);
  if (p.factor_b.empty()) read_factors(warp % 4, p);
  (void)for_factor_places(p.what, warp % 4, [](Place& place) { --place.in_use; });
  const std::string of = " (the product of " + place(p.site) + ")";
  if (p.what.in_registers)
    for (unsigned lane = 0; lane < 32; ++lane)
      if (std::memcmp(p.a_at[lane], p.a[lane].data(), 16) != 0)
        return "registers were written that a product in flight reads" + of;
  const int N = p.what.n;
  for (int r = 0; r < 16; ++r)
    for (int c = 0; c < N; ++c) {
      double sum = 0;
      for (int k = 0; k < 16; ++k)
        sum += static_cast<double>(p.factor_a[static_cast<std::size_t>(r * 16 + k)]) *
               static_cast<double>(p.factor_b[static_cast<std::size_t>(k * N + c)]);
      const int lane = r % 8 * 4 + c % 8 / 2, at = c / 8 * 4 + r / 8 * 2 + c % 2;
      double& value = acc.value[static_cast<std::size_t>(lane * (N / 2) + at)];
      value = static_cast<double>(static_cast<float>((p.what.adds ? value : 0.0) + sum));
    }
  if (--acc.in_flight > 0) return "";
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!is_hidden(acc.d[lane], N / 2)) return "results of a product in flight were written" + of;
    for (int i = 0; i < N / 2; ++i)
      acc.d[lane][i] = static_cast<float>(
          acc.value[static_cast<std::size_t>(lane) * static_cast<std::size_t>(N / 2) + static_cast<std::size_t>(i)]);
  }
  of_warp.in_flight.erase(p.key);
  return "";
}

void product_fence(Site site) {
  Warpgroups& block = warpgroups_now();
  const unsigned first = thread_now() / 32 * 32;
  exchange_and("wgmma.fence", nullptr, 0, site, [&](const Exchange&) {
    for (unsigned lane = 0; lane < 32; ++lane) block.threads[first + lane].fenced_products = true;
  });
}

void product(const Product& what, float* d, const unsigned* a, Site site) {
  struct Mine {
    Product what;
    float* d;
    const unsigned* a;
    unsigned of_a[4];
  } mine{what, d, a, {}};
  static_assert(sizeof(Mine) <= sizeof(std::uint64_t) * kLaneWords);
  if (what.in_registers) std::memcpy(mine.of_a, a, sizeof(mine.of_a));
  Warpgroups& block = warpgroups_now();
  const unsigned warp = thread_now() / 32;
  exchange_and("wgmma", &mine, sizeof(mine), site, [&](const Exchange& all) {
    PendingProduct pending{what, nullptr, {}, {}, {}, {}, site};
    std::array<float*, 32> places;
    for (unsigned lane = 0; lane < 32; ++lane) {
      const Mine of = lane_value<Mine>(all, lane, site);
      if (!same(of.what, what)) fail("lanes of a warp multiply different factors", site);
      places[lane] = of.d;
      if (what.in_registers) std::memcpy(pending.a[lane].data(), of.of_a, 16), pending.a_at[lane] = of.a;
    }
    WarpProducts& of_warp = block.products[warp];
    std::vector<Product>& of_group = block.group_products[warp / 4];
    if (of_warp.issued < of_group.size() && !same(of_group[of_warp.issued], what))
      fail("warps of a group multiply different factors", site);
    if (of_warp.issued == of_group.size()) of_group.push_back(what);
    ++of_warp.issued;
    for (unsigned lane = 0; lane < 32; ++lane)
      if (of_warp.open.products.empty() && !block.threads[warp * 32 + lane].fenced_products)
        fail("products without a wgmma.fence since the group before", site);
    if (what.n % 8 != 0 || what.n < 8 || what.n > 256) fail("a product of a width that there is not", site);
    std::string problem = problem_of_factor(what.b);
    if (problem.empty() && !what.in_registers) problem = problem_of_factor(what.a);
    if (!problem.empty()) fail(problem, site);
    // The factors are there, and every lane knows it.
    unsigned writer = kNobody;
    std::uint32_t written = 0;  // the last write that was found to be known
    const bool inside = block.for_factor_places(what, warp % 4, [&](Place& place) {
      ++place.in_use;
      if (!problem.empty()) return;
      if (place.arriving > 0)
        problem = "a product of what a copy in flight brings";
      else if (place.writer == kNobody)
        problem = "a product of what nobody wrote";
      if (!problem.empty() || (place.writer == writer && place.written == written)) return;
      for (unsigned lane = 0; lane < 32; ++lane) {
        const Knowledge& knows = block.threads[warp * 32 + lane].knows;
        const std::string of = "a product of what " + block.name_of_actor(place.writer);
        if (!knows.knows(place.writer, place.written))
          problem = of + " wrote, and nothing orders the two: a race";
        else if (!block.fenced(knows, place.writer, place.written))
          problem = of + " wrote without a fence for products";
      }
      writer = place.writer, written = place.written;
    });
    if (!inside) problem = "a factor outside of shared memory";
    if (!problem.empty()) fail(problem, site);
    pending.key = places[0];
    auto found = of_warp.in_flight.find(places[0]);
    const auto half = static_cast<std::size_t>(what.n / 2);
    if (found == of_warp.in_flight.end()) {
      Accumulators acc{places, what.n, std::vector<double>(32 * half), 0};
      for (std::size_t lane = 0; lane < 32; ++lane)
        for (std::size_t i = 0; i < half; ++i) acc.value[lane * half + i] = static_cast<double>(places[lane][i]);
      found = of_warp.in_flight.emplace(places[0], std::move(acc)).first;
      for (float* const each : places) hide(each, what.n / 2);
    } else {
      if (found->second.n != what.n) fail("a product of another shape on results in flight", site);
      for (const float* const each : places)
        if (!is_hidden(each, what.n / 2)) fail("results of a product in flight were written", site);
    }
    ++found->second.in_flight;
    if (seed_of_launch() % 2 == 1) block.read_factors(warp % 4, pending);  // else as late as it can be
    of_warp.open.products.push_back(std::move(pending));
    if (warp % 4 == 0) count("wgmma", 1), count("wgmma columns", what.n);
  });
}

void commit_products(Site site) {
  Warpgroups& block = warpgroups_now();
  const unsigned warp = thread_now() / 32;
  exchange_and("wgmma.commit_group", nullptr, 0, site, [&](const Exchange&) {
    WarpProducts& of_warp = block.products[warp];
    of_warp.open.site = site;
    of_warp.closed.push_back(std::move(of_warp.open));
    of_warp.open = {};
    for (unsigned lane = 0; lane < 32; ++lane) block.threads[warp * 32 + lane].fenced_products = false;
  });
}

void wait_for_products(int groups_left, Site site) {
  Warpgroups& block = warpgroups_now();
  const unsigned warp = thread_now() / 32, actor = block.actor_of_products(warp);
  exchange_and("wgmma.wait_group", &groups_left, sizeof(groups_left), site, [&](const Exchange&) {
    WarpProducts& of_warp = block.products[warp];
    const std::uint32_t moment = block.threads[warp * 32].knows.until[actor] + 1;
    bool some = false;
    while (static_cast<int>(of_warp.closed.size()) > groups_left) {
      for (PendingProduct& p : of_warp.closed.front().products) {
        const std::string problem = block.finish_product(warp, p);
        if (!problem.empty()) fail(problem, site);
        (void)block.for_factor_places(p.what, warp % 4, [&](Place& place) { place.product_read[warp] = moment; });
        some = true;
      }
      of_warp.closed.pop_front();
    }
    for (unsigned lane = 0; some && lane < 32; ++lane) block.threads[warp * 32 + lane].knows.until[actor] = moment;
  });
}

}  // namespace espalier::emulation
