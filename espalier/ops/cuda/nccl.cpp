// Collectives of GPUs by NCCL, which is opened when ranks first meet: a run of one rank needs none.
//
// Each group has two communicators. Sends to lower ranks go by the second one: a communicator does one thing
// at a time, and stages of a pipeline that send to each other would each wait for the other to receive.
#include <dlfcn.h>
#include <nccl.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "espalier/base/error.h"
#include "espalier/metrics/timer.h"
#include "espalier/ops/cuda/collectives.h"
#include "espalier/ops/cuda/start.h"

namespace espalier::cuda {
namespace {

using Kind = Collective::Kind;

constexpr const char* kSeveralRanks = "--device cuda on several ranks";

#define ESPALIER_NCCL(X) \
  X(GetVersion)          \
  X(GetUniqueId)         \
  X(CommInitRankConfig)  \
  X(CommFinalize)        \
  X(CommDestroy)         \
  X(CommAbort)           \
  X(CommGetAsyncError)   \
  X(GetErrorString)      \
  X(GetLastError)        \
  X(AllReduce)           \
  X(AllGather)           \
  X(ReduceScatter)       \
  X(Broadcast)           \
  X(Send)                \
  X(Recv)                \
  X(GroupStart)          \
  X(GroupEnd)

struct Nccl {
#define ESPALIER_MEMBER(name) decltype(&nccl##name) name;
  ESPALIER_NCCL(ESPALIER_MEMBER)
#undef ESPALIER_MEMBER
};

Nccl open_nccl() {
  const char* const remedy = "install nvidia-nccl-cu13 beside torch (tools/requirements-cuda-libraries.txt)";
  void* const library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw DeviceError({kSeveralRanks, "NCCL, libnccl.so.2", dlerror(), remedy});
  const auto look_up = [&]<class Function>(Function*& function, const char* name) {
    function = reinterpret_cast<Function*>(dlsym(library, name));
    if (function == nullptr) throw DeviceError({kSeveralRanks, text_of("an NCCL that has ", name), dlerror(), remedy});
  };
  Nccl nccl{};
#define ESPALIER_LOOK_UP(name) look_up(nccl.name, "nccl" #name);
  ESPALIER_NCCL(ESPALIER_LOOK_UP)
#undef ESPALIER_LOOK_UP
  // The members of ncclConfig_t, among others, have the layout of this build's header.
  const auto text = [](int version) { return text_of(version / 10000, ".", version / 100 % 100, ".", version % 100); };
  int found = 0;
  if (nccl.GetVersion(&found) != ncclSuccess || found < NCCL_VERSION_CODE)
    throw DeviceError({kSeveralRanks, text_of("NCCL ", text(NCCL_VERSION_CODE), " or newer, as this build"),
                       text_of("libnccl.so.2 of version ", text(found)), remedy});
  return nccl;
}

const Nccl& nccl() {
  static const Nccl one = open_nccl();
  return one;
}

ncclDataType_t type_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return ncclFloat64;
    case at::kFloat:
      return ncclFloat32;
    case at::kBFloat16:
      return ncclBfloat16;
    case at::kLong:
      return ncclInt64;
    case at::kInt:
      return ncclInt32;
    case at::kByte:
      return ncclUint8;
    default:
      throw InternalError({"NCCL", "a supported type", c10::toString(dtype), ""});
  }
}

// A communicator whose calls do not block, so that a missing rank is noticed in time.
class Line {
 public:
  Line(Group& host, double timeout) : timeout_(timeout) {
    ncclUniqueId id{};
    if (host.rank() == 0) expect(nccl().GetUniqueId(&id), "an id for the communicator");
    const std::string told = text_of_rank(host, std::string(id.internal, sizeof(id.internal)));
    std::memcpy(id.internal, told.data(), sizeof(id.internal));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    try {
      settle(nccl().CommInitRankConfig(&comm_, host.size(), id, host.rank(), &config), "start");
    } catch (const std::exception&) {
      give_up();
      throw;
    }
  }
  ~Line() {
    if (comm_ != nullptr && !ends_well()) give_up();
  }
  Line(const Line&) = delete;
  Line& operator=(const Line&) = delete;

  void give(Queue queue, const Collective& c) {
    if (comm_ == nullptr)
      throw CommunicationError({name_of(c.kind), "an answer of every rank", "an earlier collective that failed", ""});
    try {
      expect(nccl().GroupStart(), name_of(c.kind));
      call_to_the_end(c, stream_of(queue));
      settle(nccl().GroupEnd(), name_of(c.kind));
    } catch (const CommunicationError&) {  // other ranks may never see this call: nothing after it can be right
      give_up();
      throw;
    }
  }
  // Kernels that wait for others end.
  void give_up() {
    if (comm_ != nullptr) nccl().CommAbort(std::exchange(comm_, nullptr));
  }

 private:
  bool ends_well() {
    constexpr double kPatience = 5;  // seconds
    timeout_ = std::min(timeout_, kPatience);
    try {
      settle(nccl().CommFinalize(comm_), "end");
    } catch (const std::exception&) {
      return false;
    }
    return nccl().CommDestroy(comm_) == ncclSuccess;
  }

  // A group that a refused call leaves open would take in the calls of every communicator that follow.
  void call_to_the_end(const Collective& c, cudaStream_t stream) {
    try {
      call(c, stream);
    } catch (const CommunicationError&) {
      (void)nccl().GroupEnd();
      throw;
    }
  }

  void call(const Collective& c, cudaStream_t stream) {
    const at::Tensor& any = c.from.defined() ? c.from : c.to;
    const ncclDataType_t type = type_of(any.scalar_type());
    const auto count = [](const at::Tensor& x) { return static_cast<std::size_t>(x.numel()); };
    const auto begun = [&](ncclResult_t result) { expect(result, name_of(c.kind)); };
    switch (c.kind) {
      case Kind::sum:
      case Kind::maximum:
        return begun(nccl().AllReduce(c.from.data_ptr(), c.to.data_ptr(), count(c.to), type,
                                      c.kind == Kind::sum ? ncclSum : ncclMax, comm_, stream));
      case Kind::gather:
        return begun(nccl().AllGather(c.from.data_ptr(), c.to.data_ptr(), count(c.from), type, comm_, stream));
      case Kind::scatter_sum:
        return begun(
            nccl().ReduceScatter(c.from.data_ptr(), c.to.data_ptr(), count(c.to), type, ncclSum, comm_, stream));
      case Kind::broadcast:
        return begun(nccl().Broadcast(c.from.data_ptr(), c.to.data_ptr(), count(c.to), type, c.peer, comm_, stream));
      case Kind::send:
        return begun(nccl().Send(c.from.data_ptr(), count(c.from), type, c.peer, comm_, stream));
      case Kind::receive:
        return begun(nccl().Recv(c.to.data_ptr(), count(c.to), type, c.peer, comm_, stream));
      case Kind::exchange:
        break;
    }
    const auto row_of = [](const at::Tensor& x) { return x.size(0) == 0 ? 0 : x.nbytes() / x.size(0); };
    const std::size_t sent = row_of(c.from), received = row_of(c.to), size = any.element_size();
    const auto* from = static_cast<const std::byte*>(c.from.data_ptr());
    auto* to = static_cast<std::byte*>(c.to.data_ptr());
    for (std::size_t rank = 0; rank < c.send_rows.size(); ++rank) {
      const auto out = static_cast<std::size_t>(c.send_rows[rank]) * sent;
      const auto in = static_cast<std::size_t>(c.receive_rows[rank]) * received;
      if (out > 0) begun(nccl().Send(from, out / size, type, static_cast<int>(rank), comm_, stream));
      if (in > 0) begun(nccl().Recv(to, in / size, type, static_cast<int>(rank), comm_, stream));
      from += out, to += in;
    }
  }

  void expect(ncclResult_t result, const char* what) {
    if (result == ncclSuccess || result == ncclInProgress) return;
    throw CommunicationError({what, "an answer of every rank",
                              text_of("NCCL: ", nccl().GetErrorString(result), ", ", nccl().GetLastError(comm_)),
                              "set NCCL_DEBUG=INFO for more output from NCCL"});
  }

  // Until a call that does not block is done.
  void settle(ncclResult_t result, const char* what) {
    const double begin = Timer::steady_seconds();
    for (expect(result, what); result == ncclInProgress; expect(result, what)) {
      const double waited = Timer::steady_seconds() - begin;
      if (waited > timeout_)
        throw CommunicationError(
            {what, text_of("an answer of every rank within ", timeout_, " seconds (--comm-timeout)"), "no answer", ""});
      pause_after(waited);
      expect(nccl().CommGetAsyncError(comm_, &result), what);
    }
  }

  double timeout_;
  ncclComm_t comm_ = nullptr;
};

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(Group& host, double timeout) : rank_(host.rank()), up_(host, timeout), down_(host, timeout) {}
  ~NcclCommunicator() override {
    if (!all_over()) NcclCommunicator::give_up();
  }

  void give(Queue queue, const Collective& c) override {
    const bool down = c.kind == Kind::send ? c.peer < rank_ : c.kind == Kind::receive && c.peer > rank_;
    (down ? down_ : up_).give(queue, c);
  }
  void on_host(const std::function<void()>& call) override { call(); }
  void give_up() override {
    up_.give_up();
    down_.give_up();
  }

 private:
  // Nobody waits for what has not ended.
  static bool all_over() {
    try {
      unfinished().check();
    } catch (const std::exception&) {
      return false;
    }
    return unfinished().empty();
  }

  int rank_;
  Line up_, down_;
};

}  // namespace

std::unique_ptr<Communicator> join(const std::shared_ptr<Group>& host, double timeout) {
  return std::make_unique<NcclCommunicator>(*host, timeout);
}

}  // namespace espalier::cuda
