// Attention of sequences as graphs of cuDNN, through the header-only cudnn-frontend.
//
// Rows are packed and have a padding mask always: without one, backwards of cuDNN 9.19 go wrong where the last tile of
// keys is partly filled and lse is below -88. For gradients that are summed in one order (set_deterministic_algorithm)
// cuDNN keeps B H queries keys gradients of scores in bfloat16: callers bound the rows of such a backward. From 9.25 on
// it can add to the gradients of queries in turn instead. cudnn-frontend asks for that if its limit for gradients of
// scores is below what they take, so the limit is set to 0 where the environment has none.
#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#include "espalier/ops/cuda/cudnn.h"

#include <cudnn_frontend.h>
#include <dlfcn.h>

#include <array>
#include <cstdlib>
#include <map>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "espalier/base/error.h"

namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;  // cudnn-frontend looks its functions up in it
}

namespace espalier::cuda {
namespace {

namespace fe = cudnn_frontend;
using TensorOf = std::shared_ptr<fe::graph::Tensor_attributes>;

constexpr const char* kWhere = "--attention cudnn";
constexpr const char* kRemedy = "use --attention own";
constexpr std::size_t kOldest = 91900;
constexpr int kHopper = 9, kBlackwell = 10;  // compute capabilities

// Tells cudnn-frontend to let cuDNN add in turn. False if it does not know how, or if the environment has a limit.
bool told_to_add_in_turn() {
  constexpr const char* kLimit = "CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT";
  constexpr int kFirstThatKnows = 13200;
  if (CUDNN_FRONTEND_VERSION < kFirstThatKnows) return false;
  setenv(kLimit, "0", 0);
  return std::string_view(std::getenv(kLimit)) == "0";
}

void open_library() {
  if (fe::cudnn_dlhandle == nullptr) fe::cudnn_dlhandle = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_GLOBAL);
  if (fe::cudnn_dlhandle == nullptr)
    throw DeviceError({kWhere, "cuDNN, libcudnn.so.9", dlerror(),
                       "install nvidia-cudnn-cu13 beside torch (tools/requirements-cuda-libraries.txt)"});
  if (const std::size_t version = fe::detail::get_backend_version(); version < kOldest)
    throw DeviceError({kWhere, text_of("cuDNN ", kOldest, " or newer"), text_of(version), kRemedy});
}

// Names of a graph's tensors: an operand, its offsets, and the lengths.
std::int64_t name_of(Operand operand) { return 1 + static_cast<std::int64_t>(operand); }
std::int64_t name_of_offset(Operand operand) { return 1 + kOperands + static_cast<std::int64_t>(operand); }
constexpr std::int64_t kQueries = 1 + 2 * kOperands, kKeys = kQueries + 1;

// The tensors of a graph as cudnn-frontend describes them.
class Described {
 public:
  Described(fe::graph::Graph& graph, const SequenceGraph& shape) : graph_(graph), shape_(shape) {
    for (const OperandPlace& place : places_of(shape)) places_[static_cast<std::size_t>(place.operand)] = place;
  }
  TensorOf read(Operand operand) { return graph_.tensor(described(operand, {})); }
  void write(Operand operand, const TensorOf& result) { *result = described(operand, *result).set_output(true); }
  TensorOf numbers(std::int64_t name, std::int64_t count, fe::DataType_t type) {
    return graph_.tensor(fe::graph::Tensor_attributes()
                             .set_uid(name)
                             .set_dim({count, 1, 1, 1})
                             .set_stride({1, 1, 1, 1})
                             .set_data_type(type));
  }

 private:
  fe::graph::Tensor_attributes described(Operand operand, fe::graph::Tensor_attributes tensor) {
    const OperandPlace& place = places_[static_cast<std::size_t>(operand)];
    return tensor.set_uid(name_of(operand))
        .set_dim({place.dims.begin(), place.dims.end()})
        .set_stride({place.strides.begin(), place.strides.end()})
        .set_data_type(operand == Operand::stats ? fe::DataType_t::FLOAT : fe::DataType_t::BFLOAT16)
        .set_ragged_offset(numbers(name_of_offset(operand), shape_.sequences + 1, fe::DataType_t::INT64));
  }

  fe::graph::Graph& graph_;
  const SequenceGraph& shape_;
  std::array<OperandPlace, kOperands> places_{};
};

template <class Attributes>
Attributes attributes_of(const SequenceGraph& shape, Described& tensors) {
  Attributes attributes;
  attributes.set_name("attention")
      .set_attn_scale(static_cast<float>(shape.scale))
      .set_padding_mask(true)
      .set_seq_len_q(tensors.numbers(kQueries, shape.sequences, fe::DataType_t::INT32))
      .set_seq_len_kv(tensors.numbers(kKeys, shape.sequences, fe::DataType_t::INT32));
  if (shape.causal)
    attributes.set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT).set_diagonal_band_right_bound(0);
  return attributes;
}

void describe(fe::graph::Graph& graph, const SequenceGraph& shape) {
  Described tensors(graph, shape);
  const TensorOf q = tensors.read(Operand::q), k = tensors.read(Operand::k), v = tensors.read(Operand::v);
  if (!shape.backward) {
    auto attributes = attributes_of<fe::graph::SDPA_attributes>(shape, tensors).set_generate_stats(true);
    const auto [out, stats] = graph.sdpa(q, k, v, attributes);
    tensors.write(Operand::out, out);
    tensors.write(Operand::stats, stats);
    return;
  }
  const TensorOf out = tensors.read(Operand::out), grad_out = tensors.read(Operand::grad_out),
                 stats = tensors.read(Operand::stats);
  auto attributes = attributes_of<fe::graph::SDPA_backward_attributes>(shape, tensors)
                        .set_deterministic_algorithm(shape.deterministic);
  const auto [grad_q, grad_k, grad_v] = graph.sdpa_backward(q, k, v, out, grad_out, stats, attributes);
  tensors.write(Operand::grad_q, grad_q);
  tensors.write(Operand::grad_k, grad_k);
  tensors.write(Operand::grad_v, grad_v);
}

void expect(const fe::error_t& status, const SequenceGraph& shape) {
  if (status.is_good()) return;
  throw DeviceError(
      {kWhere,
       text_of("a graph of cuDNN for heads of ", shape.head_size, ", ", shape.query_heads, " of queries and ",
               shape.key_heads, " of keys, ", shape.sequences, " sequences of at most ", shape.queries, " queries and ",
               shape.keys, " keys", shape.backward ? ", backward" : ""),
       status.err_msg, kRemedy});
}

class CudnnGraphs final : public SequenceGraphs {
 public:
  CudnnGraphs(int capability, cudnnHandle_t handle) : capability_(capability), handle_(handle) {}
  CudnnGraphs(int capability, std::shared_ptr<const fe::DeviceProperties> device)
      : capability_(capability), device_(std::move(device)) {}

  bool adds_in_turn() const override { return adds_in_turn_; }
  std::int64_t workspace_bytes(const SequenceGraph& shape) override { return built(shape).workspace; }
  void run(const SequenceGraph& shape, const SequenceAddresses& addresses, void* workspace) override {
    std::unordered_map<std::int64_t, void*> pack{{kQueries, addresses.queries}, {kKeys, addresses.keys}};
    for (const OperandPlace& place : places_of(shape)) {
      const auto index = static_cast<std::size_t>(place.operand);
      pack[name_of(place.operand)] = addresses.operand[index];
      pack[name_of_offset(place.operand)] = addresses.offset[index];
    }
    expect(built(shape).graph.execute(handle_, pack, workspace), shape);
  }

 private:
  struct Built {
    fe::graph::Graph graph;
    std::int64_t workspace = 0;
  };

  // Nothing is dropped, work of it may be under way: sizes are powers of two, so there are few.
  Built& built(const SequenceGraph& shape) {
    const auto found = built_.find(shape);
    if (found != built_.end()) return *found->second;
    auto one = std::make_unique<Built>();
    build(shape, *one);
    return *built_.emplace(shape, std::move(one)).first->second;
  }

  void build(const SequenceGraph& shape, Built& one) const {
    one.graph.set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT)
        .set_sm_version(10 * capability_);
    if (device_ != nullptr) one.graph.set_device_properties(device_);
    describe(one.graph, shape);
    expect(one.graph.validate(), shape);
    expect(handle_ == nullptr ? one.graph.build_operation_graph() : one.graph.build_operation_graph(handle_), shape);
    expect(one.graph.create_execution_plans({fe::HeurMode_t::A}), shape);
    expect(one.graph.check_support(), shape);
    expect(one.graph.build_plans(), shape);
    expect(one.graph.get_workspace_size(one.workspace), shape);
  }

  int capability_;
  bool adds_in_turn_ = can_add_in_turn(fe::detail::get_backend_version(), capability_) && told_to_add_in_turn();
  cudnnHandle_t handle_ = nullptr;
  std::shared_ptr<const fe::DeviceProperties> device_;
  std::map<SequenceGraph, std::unique_ptr<Built>> built_;
};

// On others cuDNN has no fixed order for packed rows.
void require_taken(int capability) {
  if (capability == kHopper || capability == kBlackwell) return;
  throw DeviceError(
      {kWhere, "a GPU of compute capability 9.0 or 10.x", text_of(capability, ".x"), "use --attention own or flash"});
}

}  // namespace

std::unique_ptr<SequenceGraphs> open_cudnn(Stream stream, int capability) {
  require_taken(capability);
  open_library();
  cudnnHandle_t handle = nullptr;  // of the process
  for (const cudnnStatus_t status : {fe::detail::create_handle(&handle), fe::detail::set_stream(handle, stream)})
    if (status != CUDNN_STATUS_SUCCESS)
      throw DeviceError({kWhere, "a handle of cuDNN", fe::detail::get_error_string(status), kRemedy});
  return std::make_unique<CudnnGraphs>(capability, handle);
}

std::unique_ptr<SequenceGraphs> cudnn_without_gpu(const std::string& device_properties, int capability) {
  require_taken(capability);
  open_library();
  const auto device = std::make_shared<fe::DeviceProperties>();
  if (const fe::error_t status = device->deserialize({device_properties.begin(), device_properties.end()});
      status.is_bad())
    throw DeviceError({kWhere, "device properties from cuDNN", status.err_msg, ""});
  return std::make_unique<CudnnGraphs>(capability, device);
}

}  // namespace espalier::cuda
