// Where the stand-in for libnccl.so.2 tells its calls: the library is opened by name, so it knows no recorder.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace espalier::testing {

struct NcclListener {
  void (*called)(const char* name);
  void* (*make)();
  void (*group)(int change);
  void (*done)();
  void (*end)(void* communicator, bool finalizes);
  // False: NCCL refuses the call.
  bool (*collective)(void* communicator, cudaStream_t stream, const void* from, std::size_t from_bytes, void* to,
                     std::size_t to_bytes);
  int version = 0;  // 0: that of NCCL's header
};

}  // namespace espalier::testing
