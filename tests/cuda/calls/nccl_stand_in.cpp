// libnccl.so.2 of one rank: calls go to a listener. Calls that do not block are under way until their communicator's
// state is asked for.
#include "tests/cuda/calls/nccl_stand_in.h"

#include <nccl.h>

#include <cstring>

static espalier::testing::NcclListener listener;

namespace {

std::size_t bytes(std::size_t count, ncclDataType_t type) {
  switch (type) {
    case ncclFloat64:
    case ncclInt64:
      return 8 * count;
    case ncclFloat32:
    case ncclInt32:
      return 4 * count;
    case ncclBfloat16:
      return 2 * count;
    default:
      return count;
  }
}

ncclResult_t collective(const char* name, ncclComm_t comm, cudaStream_t stream, const void* from, std::size_t sent,
                        void* to, std::size_t received) {
  listener.called(name);
  return listener.collective(comm, stream, from, sent, to, received) ? ncclSuccess : ncclInvalidArgument;
}

}  // namespace

extern "C" {

void espalier_listen(const espalier::testing::NcclListener* to) { listener = *to; }

ncclResult_t ncclGetVersion(int* version) {
  *version = listener.version == 0 ? NCCL_VERSION_CODE : listener.version;
  return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::memset(id, 1, sizeof(*id));
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int, ncclUniqueId, int, ncclConfig_t* config) {
  listener.called(config->blocking == 0 ? "ncclCommInitRankConfig" : "a communicator that blocks");
  *comm = static_cast<ncclComm_t>(listener.make());
  return ncclInProgress;
}
ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  listener.end(comm, true);
  return ncclInProgress;
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  listener.called("ncclCommDestroy");
  listener.end(comm, false);
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t) {
  listener.called("ncclCommAbort");
  return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* result) {
  listener.done();
  *result = ncclSuccess;
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t) { return "an error"; }
const char* ncclGetLastError(ncclComm_t) { return "an error"; }
ncclResult_t ncclGroupStart() {
  listener.group(1);
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  listener.group(-1);
  return ncclInProgress;
}
ncclResult_t ncclAllReduce(const void* from, void* to, std::size_t count, ncclDataType_t type, ncclRedOp_t,
                           ncclComm_t comm, cudaStream_t stream) {
  return collective("ncclAllReduce", comm, stream, from, bytes(count, type), to, bytes(count, type));
}
ncclResult_t ncclAllGather(const void* from, void* to, std::size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  return collective("ncclAllGather", comm, stream, from, bytes(count, type), to, 2 * bytes(count, type));
}
ncclResult_t ncclReduceScatter(const void* from, void* to, std::size_t count, ncclDataType_t type, ncclRedOp_t,
                               ncclComm_t comm, cudaStream_t stream) {
  return collective("ncclReduceScatter", comm, stream, from, 2 * bytes(count, type), to, bytes(count, type));
}
ncclResult_t ncclBroadcast(const void* from, void* to, std::size_t count, ncclDataType_t type, int, ncclComm_t comm,
                           cudaStream_t stream) {
  return collective("ncclBroadcast", comm, stream, from, bytes(count, type), to, bytes(count, type));
}
ncclResult_t ncclSend(const void* from, std::size_t count, ncclDataType_t type, int, ncclComm_t comm,
                      cudaStream_t stream) {
  return collective("ncclSend", comm, stream, from, bytes(count, type), nullptr, 0);
}
ncclResult_t ncclRecv(void* to, std::size_t count, ncclDataType_t type, int, ncclComm_t comm, cudaStream_t stream) {
  return collective("ncclRecv", comm, stream, nullptr, 0, to, bytes(count, type));
}

}  // extern "C"
