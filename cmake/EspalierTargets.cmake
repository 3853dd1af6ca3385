# How every target of Espalier is compiled: one set of flags (so that one precompiled header serves all),
# one library per folder (so that a folder links only what stands above it), and run-time dispatch by CPU.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
# A plain -fPIC everywhere: with CMake's own setting executables get -fPIE and silently lose the precompiled header.
# Multiply-adds are fused where the sources say fma, and nowhere else: bits do not depend on the compiler.
add_compile_options(-fPIC -Wall -Wextra -Wno-unknown-pragmas -Winvalid-pch -fpch-preprocess -fno-math-errno -ffp-contract=off)
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
  # The collector of the compiler would walk through the whole precompiled header again and again: a tenth of its time,
  # for a quarter more memory.
  add_compile_options("SHELL:--param ggc-min-expand=400" "SHELL:--param ggc-min-heapsize=1000000")
endif()
set(CMAKE_CXX_FLAGS_RELEASE "-O2 -DNDEBUG")
set(CMAKE_CXX_FLAGS_DEBUG "-O0 -g")
set(ESPALIER_KERNEL_OPTIMISATION -O3)  # in Debug too; -O2 gives the same bits, and recurrent layers are up to 7 % slower
if(ESPALIER_SANITIZE)
  set(ESPALIER_KERNEL_OPTIMISATION -O0)  # an instrumented kernel takes minutes to compile with -O3, seconds with -O0
  add_compile_options(-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer)
  add_link_options(-fsanitize=address,undefined)
endif()

find_program(ESPALIER_CCACHE ccache)
if(ESPALIER_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env
    CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime ${ESPALIER_CCACHE})
endif()

# Headers take most of the time of most files (a file without a line takes 2.5 seconds with ATen's, although these are
# precompiled): several files of a library or a test are compiled as one. OFF compiles each by itself, so that a change
# of one is compiled faster.
option(ESPALIER_UNITY "compile several files of a library or a test at once" ON)

set(ESPALIER_QUICK_TO_COMPILE $<$<CONFIG:Release>:-O1>)  # a quarter less to compile than -O2
# As much less again: GCC without the passes that cost most where loops are few.
set(ESPALIER_QUICKEST_TO_COMPILE ${ESPALIER_QUICK_TO_COMPILE})
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
  foreach(pass ipa-pure-const ipa-reference tree-sra tree-dse tree-pta ivopts move-loop-invariants tree-loop-optimize if-conversion
      if-conversion2 tree-slsr tree-sink tree-ch ssa-phiopt cprop-registers combine-stack-adjustments shrink-wrap)
    list(APPEND ESPALIER_QUICKEST_TO_COMPILE $<$<CONFIG:Release>:-fno-${pass}>)
  endforeach()
endif()
# espalier_library(NAME FILES... [TORCH] [COLD | OUTSIDE] [ALONE files...] [LINK targets...]): the folder's static library
# espalier_NAME.
# TORCH: its files see ATen (through the precompiled header); without it they must not. COLD: its own loops are a
# negligible part of a step. OUTSIDE: it runs outside of steps. ALONE: files with names that another file has, too, or
# whose classes have members of unnamed namespaces, compiled by themselves.
function(espalier_library name)
  cmake_parse_arguments(arg "TORCH;COLD;OUTSIDE" "" "ALONE;LINK;FILES" ${ARGN})
  list(APPEND arg_FILES ${arg_UNPARSED_ARGUMENTS} ${arg_ALONE})
  set_source_files_properties(${arg_ALONE} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  espalier_take_faulty_files(arg_FILES)
  add_library(espalier_${name} STATIC ${arg_FILES})
  target_include_directories(espalier_${name} PUBLIC "${PROJECT_SOURCE_DIR}")
  target_link_libraries(espalier_${name} PUBLIC ${arg_LINK} OpenMP::OpenMP_CXX)
  set_target_properties(espalier_${name} PROPERTIES UNITY_BUILD ${ESPALIER_UNITY} UNITY_BUILD_BATCH_SIZE 24)
  if(arg_COLD)
    target_compile_options(espalier_${name} PRIVATE ${ESPALIER_QUICK_TO_COMPILE})
  elseif(arg_OUTSIDE)
    target_compile_options(espalier_${name} PRIVATE ${ESPALIER_QUICKEST_TO_COMPILE})
  endif()
  if(arg_TORCH)
    espalier_use_torch(espalier_${name})
  else()
    espalier_use_headers(espalier_${name} espalier_plain_headers)
  endif()
endfunction()

# espalier_refuse_links(TARGET OTHERS...): an error if the target links one of the others, directly or not.
function(espalier_refuse_links target)
  set(found ${target})
  set(left ${target})
  while(left)
    list(POP_FRONT left library)
    get_target_property(links ${library} INTERFACE_LINK_LIBRARIES)
    foreach(link IN LISTS links)
      if(TARGET "${link}" AND NOT link IN_LIST found)
        list(APPEND found "${link}")
        list(APPEND left "${link}")
        set(reason_${link} "${reason_${library}} -> ${link}")
      endif()
    endforeach()
  endwhile()
  foreach(other ${ARGN})
    if(other IN_LIST found)
      message(FATAL_ERROR "${target} must not link ${other}, found ${target}${reason_${other}}")
    endif()
  endforeach()
endfunction()

# Headers that most files include, compiled once for each kind of target: json.h alone takes two seconds.
set(ESPALIER_COMMON_HEADERS <algorithm> <chrono> <cmath> <cstdint> <filesystem> <fstream> <functional> <map> <memory>
  <optional> <span> <sstream> <string> <unordered_map> <vector> "${PROJECT_SOURCE_DIR}/espalier/base/json.h")

# Gives a target a precompiled header: the common ones and what stands behind `name`, which every target with that name
# shares. LINK: where those headers are from.
function(espalier_use_headers target name)
  cmake_parse_arguments(arg "" "" "HEADERS;LINK" ${ARGN})
  if(NOT TARGET ${name})
    file(WRITE "${CMAKE_BINARY_DIR}/${name}.cpp" "")
    add_library(${name} OBJECT "${CMAKE_BINARY_DIR}/${name}.cpp")
    target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}")
    target_link_libraries(${name} PUBLIC ${arg_LINK} OpenMP::OpenMP_CXX)
    target_precompile_headers(${name} PRIVATE ${arg_HEADERS} ${ESPALIER_COMMON_HEADERS})
  endif()
  target_precompile_headers(${target} REUSE_FROM ${name})
endfunction()

# Tensors and the functions of ATen that many files call. <ATen/ATen.h> has two thousand more: a second for each file.
set(ESPALIER_TORCH_HEADERS <ATen/core/Tensor.h> <ATen/Context.h> <ATen/Parallel.h> <ATen/TensorOperators.h>)
foreach(function arange empty empty_like from_blob full ones tensor where zeros zeros_like)
  list(APPEND ESPALIER_TORCH_HEADERS <ATen/ops/${function}.h>)
endforeach()
set(ESPALIER_TORCH_TEST_HEADERS ${ESPALIER_TORCH_HEADERS})
foreach(function allclose concat equal full_like matmul mm ones_like randn stack)
  list(APPEND ESPALIER_TORCH_TEST_HEADERS <ATen/ops/${function}.h>)
endforeach()

# Gives a target ATen, with its headers precompiled.
function(espalier_use_torch target)
  target_link_libraries(${target} PUBLIC EspalierTorch::cpu)
  espalier_use_headers(${target} espalier_torch_headers HEADERS ${ESPALIER_TORCH_HEADERS} LINK EspalierTorch::cpu)
endfunction()

# The sets of base/compiled_sets.h, each as a list of its name, the bytes of a vector and the compiler's flags; and the
# versions that multiply bfloat16 as it is (Bfloat16Products of base/instruction_set.h), whose ESPALIER_BFLOAT16_DOT,
# _TILES or _EMULATED_TILES says how.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(ESPALIER_ARCHITECTURE x86_64)
  set(ESPALIER_SETS baseline avx2 avx512)
  set(ESPALIER_SET_baseline 16 -O2)  # of processors before 2013: not worth the seconds of -O3
  set(ESPALIER_SET_avx2 32 -mavx2 -mfma -mf16c)
  set(ESPALIER_SET_avx512 64 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mprefer-vector-width=512)
  set(ESPALIER_BFLOAT16_SETS avx512_dot avx512_emulated_tiles avx512_tiles)
  set(ESPALIER_SET_OF_PAIRS avx512_dot)
  set(ESPALIER_SET_avx512_dot ${ESPALIER_SET_avx512} -mavx512bf16 -DESPALIER_BFLOAT16_DOT)
  set(ESPALIER_SET_avx512_emulated_tiles ${ESPALIER_SET_avx512} -mavx512bf16 -DESPALIER_BFLOAT16_EMULATED_TILES)
  set(ESPALIER_SET_avx512_tiles ${ESPALIER_SET_avx512} -mavx512bf16 -mamx-tile -mamx-bf16 -DESPALIER_BFLOAT16_TILES)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
  set(ESPALIER_ARCHITECTURE aarch64)
  set(ESPALIER_SETS neon)
  set(ESPALIER_SET_neon 16)
  add_compile_options(-fsigned-char)  # plain chars have a sign, as in a build for x86-64
else()
  message(FATAL_ERROR "Espalier is for x86-64 and aarch64; this is ${CMAKE_SYSTEM_PROCESSOR}")
endif()

# One version of one file: ESPALIER_SIMD names it (a namespace), ESPALIER_SIMD_BYTES is its vector width.
function(espalier_simd_version target file set)
  list(POP_FRONT ESPALIER_SET_${set} bytes)
  get_filename_component(stem "${file}" NAME_WE)
  set(object ${target}_${stem}_${set})
  add_library(${object} OBJECT "${file}")
  target_compile_definitions(${object} PRIVATE ESPALIER_SIMD=${set} ESPALIER_SIMD_BYTES=${bytes})
  target_compile_options(${object} PRIVATE ${ESPALIER_KERNEL_OPTIMISATION} ${ESPALIER_SET_${set}})
  target_include_directories(${object} PRIVATE "${PROJECT_SOURCE_DIR}")
  target_link_libraries(${object} PRIVATE OpenMP::OpenMP_CXX)
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:${object}>)
endfunction()

# espalier_simd_sources(TARGET FILES...): compiles each torch-free file once per instruction set. The folder's dispatch
# file picks one of them at run time.
function(espalier_simd_sources target)
  foreach(file ${ARGN})
    foreach(set ${ESPALIER_SETS})
      espalier_simd_version(${target} ${file} ${set})
    endforeach()
  endforeach()
endfunction()

# espalier_bfloat16_sources(TARGET FILES...): the versions more that multiply bfloat16 as it is.
function(espalier_bfloat16_sources target)
  foreach(file ${ARGN})
    foreach(set ${ESPALIER_BFLOAT16_SETS})
      espalier_simd_version(${target} ${file} ${set})
    endforeach()
  endforeach()
endfunction()

# A target that `make sweep` alone builds.
function(espalier_build_for_sweep target)
  if(NOT TARGET sweep_tests)
    add_custom_target(sweep_tests)
  endif()
  set_target_properties(${target} PROPERTIES EXCLUDE_FROM_ALL ON)
  add_dependencies(sweep_tests ${target})
endfunction()

# espalier_test(NAME FILES... LINK targets... [ALONE files...] [TORCH] [SWEEP] [PAIRS filter] [PRODUCTS filter]
# [ROUNDING filter] [THREADS filter]): one GoogleTest binary and one ctest entry. ALONE as in espalier_library.
# SWEEP: built and run by `make sweep` alone, and by CI where a change touches what it enters.
# PAIRS, PRODUCTS: GoogleTest filters of the cases of which `make test` runs all, because every two values stand together in
# them, and of those that it leaves to `make sweep`, because they are all values together.
# ROUNDING: a GoogleTest filter of the cases that judge float32 or bfloat16, which tools/run_tests.py repeats under
# every instruction set of the processor. (Kernel tests that go through the sets by themselves need none.)
# THREADS: the cases are too small for threads, which would only wait for each other: they run on one, and those of the
# filter once more on all.
function(espalier_test name)
  cmake_parse_arguments(arg "TORCH;SWEEP" "PAIRS;PRODUCTS;ROUNDING;THREADS" "ALONE;LINK;FILES;LABELS" ${ARGN})
  list(APPEND arg_FILES ${arg_UNPARSED_ARGUMENTS} ${arg_ALONE})
  set_source_files_properties(${arg_ALONE} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  add_executable(${name} ${arg_FILES})
  set_target_properties(${name} PROPERTIES UNITY_BUILD ${ESPALIER_UNITY} UNITY_BUILD_BATCH_SIZE 8)
  target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}")
  target_compile_options(${name} PRIVATE ${ESPALIER_QUICK_TO_COMPILE})
  target_link_libraries(${name} PRIVATE ${arg_LINK} espalier_test_source espalier_test_main OpenMP::OpenMP_CXX)
  if(arg_TORCH)
    target_link_libraries(${name} PRIVATE EspalierTorch::cpu)
    espalier_use_headers(${name} espalier_torch_test_headers
      HEADERS ${ESPALIER_TORCH_TEST_HEADERS} <gtest/gtest.h> LINK EspalierTorch::cpu GTest::gtest)
  else()
    espalier_use_headers(${name} espalier_plain_test_headers
      HEADERS <gtest/gtest.h> LINK GTest::gtest)
  endif()
  add_test(NAME ${name} COMMAND ${name})
  if(arg_SWEEP)
    list(APPEND arg_LABELS sweep)
    espalier_build_for_sweep(${name})
  endif()
  foreach(filter PAIRS PRODUCTS ROUNDING THREADS)
    string(TOLOWER "${filter}" label)
    if(arg_${filter})
      list(APPEND arg_LABELS "${label}=${arg_${filter}}")
    endif()
  endforeach()
  set_tests_properties(${name} PROPERTIES LABELS "${arg_LABELS}")
endfunction()
