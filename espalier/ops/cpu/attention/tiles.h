// Products of attention on the matrix tiles of AMX: 16 x 16 float32 sums of 32 bfloat16 products at a time.
//
// The kernels use a small interface with two implementations: HardwareTiles (the instructions) and EmulatedTiles (the
// same operations in C++). Tests run the emulation on any CPU with AVX512_BF16, which checks layout, indexing and
// edges; tiles_test.cpp also runs the machine code of HardwareTiles there, each instruction emulated by a signal
// handler. The speed on a CPU with AMX has not been measured.
//   tile t: 16 rows of 64 bytes; t = 0..3 sums, t = 4, 5 left factors [row][pair], t = 6, 7 right ones [pair][column]
//   dot<i, j>: tile(2 i + j) += tile(4 + i) . tile(6 + j); the products of a pair's first numbers and of its second
//     numbers are summed apart, then added to each other and to the sum (Intel SDM, TDPBF16PS)
#pragma once

#include "espalier/ops/cpu/attention/panel.h"

namespace espalier::ESPALIER_SIMD {

inline constexpr int kTileSide = 16;

#if defined(__AMX_BF16__) || defined(__AMXBF16__)  // GCC's name, and that of Clang before 16
// Configuration and loads are written as assembly: the compiler's header does not declare that they read memory, so the
// compiler might delay earlier stores.
class HardwareTiles {
 public:
  // Tiles are configured while a thread multiplies: an unreleased configuration slows every switch of threads.
  struct Session {
    Session() {
      struct alignas(64) {
        std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
        std::uint16_t row_bytes[16] = {};
        std::uint8_t rows[16] = {};
      } config;
      static_assert(sizeof(config) == 64);
      for (int t = 0; t < 8; ++t) config.row_bytes[t] = 64, config.rows[t] = kTileSide;
      __asm__ volatile("ldtilecfg %0" ::"m"(config));
    }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
    ~Session() { _tile_release(); }
  };

#define ESPALIER_EACH_TILE(body) body(0) body(1) body(2) body(3) body(4) body(5) body(6) body(7)
  template <int t>
  void clear() {
#define ESPALIER_TILE(n) \
  if constexpr (t == n) _tile_zero(n);
    ESPALIER_EACH_TILE(ESPALIER_TILE)
#undef ESPALIER_TILE
  }
  template <int t>
  void load(const void* from, std::int64_t stride_bytes) {
#define ESPALIER_TILE(n) \
  if constexpr (t == n) __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #n ::"r"(from), "r"(stride_bytes) : "memory");
    ESPALIER_EACH_TILE(ESPALIER_TILE)
#undef ESPALIER_TILE
  }
  template <int t>
  void store(void* to, std::int64_t stride_bytes) {
#define ESPALIER_TILE(n) \
  if constexpr (t == n) _tile_stored(n, to, stride_bytes);
    ESPALIER_EACH_TILE(ESPALIER_TILE)
#undef ESPALIER_TILE
  }
#undef ESPALIER_EACH_TILE
  template <int i, int j>
  void dot() {
    if constexpr (i == 0 && j == 0) _tile_dpbf16ps(0, 4, 6);
    if constexpr (i == 0 && j == 1) _tile_dpbf16ps(1, 4, 7);
    if constexpr (i == 1 && j == 0) _tile_dpbf16ps(2, 5, 6);
    if constexpr (i == 1 && j == 1) _tile_dpbf16ps(3, 5, 7);
  }
};
#endif

class EmulatedTiles {
 public:
  // Like the hardware, tiles do nothing outside of a session of their thread.
  struct Session {
    Session() { ++open(); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
    ~Session() { --open(); }
    static int& open() {
      static thread_local int sessions = 0;
      return sessions;
    }
  };

  template <int t>
  void clear() {
    __builtin_memset(tile_[t], 0, sizeof(tile_[t]));
  }
  template <int t>
  void load(const void* from, std::int64_t stride_bytes) {
    for (int r = 0; r < kTileSide; ++r)
      __builtin_memcpy(tile_[t][r], static_cast<const char*>(from) + r * stride_bytes, 64);
  }
  template <int t>
  void store(void* to, std::int64_t stride_bytes) {
    for (int r = 0; r < kTileSide; ++r) __builtin_memcpy(static_cast<char*>(to) + r * stride_bytes, tile_[t][r], 64);
  }
  template <int i, int j>
  void dot() {
    if (Session::open() != 1) __builtin_trap();
    for (int r = 0; r < kTileSide; ++r)
      for (int c = 0; c < kTileSide; ++c) {
        float low = 0, high = 0;
        for (int k = 0; k < kTileSide; ++k) {
          const std::uint32_t a = tile_[4 + i][r][k], b = tile_[6 + j][k][c];
          low = __builtin_fmaf(as_float(a << 16), as_float(b << 16), low);
          high = __builtin_fmaf(as_float(a & 0xffff0000u), as_float(b & 0xffff0000u), high);
        }
        std::uint32_t& sum = tile_[2 * i + j][r][c];
        sum = __builtin_bit_cast(std::uint32_t, as_float(sum) + (low + high));
      }
  }

 private:
  static float as_float(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }
  std::uint32_t tile_[8][kTileSide][kTileSide];
};

// The products of tile.h in tiles: `vectors` is even, rows are computed in multiples of 16, steps are multiples of 16.
template <class Tiles>
struct TileProducts {
  static constexpr int kSteps = kTileSide, kRows = kTileSide, kVectors = 2;
  static constexpr int kKeys = 128;
  using Session = typename Tiles::Session;

  template <int vectors, bool with_top>
  static void scores(std::int64_t n, std::int64_t steps, const Pair* x, const Pair* y, float* s, float* top) {
    constexpr int W = kPanel<float>;
    multiply_tiles<false>(n, vectors, steps, x, steps, y, W, s, W);
    if constexpr (with_top)
      for (int v = 0; v < vectors; ++v) {
        FloatVector best = load(top + v * kLanes<float>);
        for (std::int64_t j = 0; j < n; ++j) best = max(load(s + j * W + v * kLanes<float>), best);
        store(top + v * kLanes<float>, best);
      }
  }
  template <int vectors, bool with_alpha, Left layout>
  static void weighted(std::int64_t steps, std::int64_t rows_of_c, const Pair* x, std::int64_t stride, const Pair* s,
                       float* c, const float* alpha) {
    static_assert(layout == Left::steps_adjacent);
    constexpr int W = kPanel<float>;
    if constexpr (with_alpha)
      for (std::int64_t d = 0; d < rows_of_c; ++d)
        for (int v = 0; v < vectors * kLanes<float>; v += kLanes<float>)
          store(c + d * W + v, load(c + d * W + v) * load(alpha + v));
    multiply_tiles<true>(rows_of_c, vectors, steps, x, stride, s, W, c, W);
  }
  static void outer(std::int64_t n, std::int64_t steps, const Pair* s, std::int64_t s_stride, const Pair* r_panel,
                    float* c, std::int64_t stride) {
    multiply_tiles<true>(n, static_cast<int>(stride / kTileSide), steps, s, s_stride, r_panel, stride, c, stride);
  }

 private:
  // C (+)= A B in squares of up to 2 x 2 tiles; strides in pairs and in sums.
  template <bool add>
  static void multiply_tiles(std::int64_t n, int vectors, std::int64_t steps, const Pair* a, std::int64_t a_stride,
                             const Pair* b, std::int64_t b_stride, float* c, std::int64_t c_stride) {
    for (std::int64_t r = 0; r < n; r += 2 * kTileSide)
      for (int v = 0; v < vectors; v += 2) {
        const Pair *left = a + r * a_stride, *right = b + v * kTileSide;
        float* sums = c + r * c_stride + v * kTileSide;
        const bool tall = r + kTileSide < n, wide = v + 1 < vectors;
        if (tall && wide)
          square<add, true, true>(steps, left, a_stride, right, b_stride, sums, c_stride);
        else if (tall)
          square<add, true, false>(steps, left, a_stride, right, b_stride, sums, c_stride);
        else if (wide)
          square<add, false, true>(steps, left, a_stride, right, b_stride, sums, c_stride);
        else
          square<add, false, false>(steps, left, a_stride, right, b_stride, sums, c_stride);
      }
  }
  template <bool add, bool tall, bool wide>
  static void square(std::int64_t steps, const Pair* a, std::int64_t a_stride, const Pair* b, std::int64_t b_stride,
                     float* c, std::int64_t c_stride) {
    Tiles tiles;
    float* below = c + kTileSide * c_stride;
    start<add, 0>(tiles, c, 4 * c_stride);
    if constexpr (wide) start<add, 1>(tiles, c + kTileSide, 4 * c_stride);
    if constexpr (tall) start<add, 2>(tiles, below, 4 * c_stride);
    if constexpr (tall && wide) start<add, 3>(tiles, below + kTileSide, 4 * c_stride);
    for (std::int64_t k = 0; k < steps; k += kTileSide) {
      tiles.template load<4>(a + k, 4 * a_stride);
      tiles.template load<6>(b + k * b_stride, 4 * b_stride);
      tiles.template dot<0, 0>();
      if constexpr (wide) {
        tiles.template load<7>(b + k * b_stride + kTileSide, 4 * b_stride);
        tiles.template dot<0, 1>();
      }
      if constexpr (tall) {
        tiles.template load<5>(a + kTileSide * a_stride + k, 4 * a_stride);
        tiles.template dot<1, 0>();
        if constexpr (wide) tiles.template dot<1, 1>();
      }
    }
    tiles.template store<0>(c, 4 * c_stride);
    if constexpr (wide) tiles.template store<1>(c + kTileSide, 4 * c_stride);
    if constexpr (tall) tiles.template store<2>(below, 4 * c_stride);
    if constexpr (tall && wide) tiles.template store<3>(below + kTileSide, 4 * c_stride);
  }
  template <bool add, int t>
  static void start(Tiles& tiles, const float* c, std::int64_t stride_bytes) {
    if constexpr (add)
      tiles.template load<t>(c, stride_bytes);
    else
      tiles.template clear<t>();
  }
};

}  // namespace espalier::ESPALIER_SIMD
