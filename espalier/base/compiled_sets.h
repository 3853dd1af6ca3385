// The instruction sets that kernels are compiled for, a table for each architecture: the only place that names one,
// beside the headers simd_x86_64.h and simd_aarch64.h and the files processor_x86_64.cpp and processor_aarch64.cpp.
// cmake/EspalierTargets.cmake has the compiler's flags of each set.
//
//   ESPALIER_EACH_SET(row, ...)       row(set, ...) for each set, narrowest first
//   ESPALIER_EACH_LEVEL(row)          row(name, set, products) for each choice of ESPALIER_INSTRUCTION_SET
//   ESPALIER_EACH_BFLOAT16_SET(row)   row(products, set) for the versions that multiply bfloat16 as it is
//   ESPALIER_SET_OF_PAIRS(row)        row(set) for the one with instructions for pairs of bfloat16, if there is one
//   ESPALIER_FUSING                   attribute of a function that may use fused multiply-adds (processor_fuses)
#pragma once

#if defined(__x86_64__)
#define ESPALIER_EACH_SET(row, ...) \
  row(baseline __VA_OPT__(, ) __VA_ARGS__) row(avx2 __VA_OPT__(, ) __VA_ARGS__) row(avx512 __VA_OPT__(, ) __VA_ARGS__)
#define ESPALIER_EACH_LEVEL(row)                                                                     \
  row("baseline", baseline, converted) row("avx2", avx2, converted) row("avx512", avx512, converted) \
      row("emulated_amx_bf16", avx512, emulated_tiles) row("avx512_bf16", avx512, dot) row("amx_bf16", avx512, tiles)
#define ESPALIER_EACH_BFLOAT16_SET(row) \
  row(dot, avx512_dot) row(emulated_tiles, avx512_emulated_tiles) row(tiles, avx512_tiles)
#define ESPALIER_SET_OF_PAIRS(row) row(avx512_dot)
#define ESPALIER_FUSING [[gnu::target("fma"), gnu::flatten]]

#elif defined(__aarch64__)
// Every processor of the architecture has NEON with fused multiply-adds. There is no row for SVE, because the servers'
// vectors are no wider in sum (Neoverse V1: two of 256 bits a cycle against four of 128; V2: four of 128 either way),
// and none for BFDOT, which rounds sums to odd: they would have other bits than on x86-64.
#define ESPALIER_EACH_SET(row, ...) row(neon __VA_OPT__(, ) __VA_ARGS__)
#define ESPALIER_EACH_LEVEL(row) row("neon", neon, converted)
#define ESPALIER_EACH_BFLOAT16_SET(row)
#define ESPALIER_SET_OF_PAIRS(row)
#define ESPALIER_FUSING

#else
#error "Espalier's kernels are compiled for x86-64 and aarch64"
#endif
