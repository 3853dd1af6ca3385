# Toolchain file of `make aarch64` (tools/aarch64.sh): Debian's cross compiler, and libraries unpacked into ESPALIER_AARCH64_ROOT. A build
# on a machine that is aarch64 needs no such file.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES ESPALIER_AARCH64_ROOT)
set(CMAKE_FIND_ROOT_PATH "${ESPALIER_AARCH64_ROOT}" /usr/aarch64-linux-gnu)
foreach(kind LIBRARY INCLUDE PACKAGE)
  set(CMAKE_FIND_ROOT_PATH_MODE_${kind} ONLY)
endforeach()
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
