// forward and backward of attention.h: checks, the choice of instructions, and the memory the kernels work in.
//
// Scratch is kept per calling thread and grows to the largest call: forward below 2 MB a thread at head sizes up to
// 256, backward at most about 4 MB plus below 2 MB a thread (one panel per head where even that exceeds 4 MB).
#include <omp.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <type_traits>

#include "espalier/base/defined_sums.h"
#include "espalier/base/error.h"
#include "espalier/base/instruction_set.h"
#include "espalier/ops/cpu/attention/kernels.h"

namespace espalier {

// Defined in cpu/forward.cpp and cpu/backward.cpp, once per instruction set; sets of ESPALIER_EACH_BFLOAT16_SET for
// bfloat16 only.
#define ESPALIER_DECLARE_SET(set)                         \
  namespace set {                                         \
  template <class T>                                      \
  void add_forward(attention::cpu::Kernels<T>& kernels);  \
  template <class T>                                      \
  void add_backward(attention::cpu::Kernels<T>& kernels); \
  }
#define ESPALIER_DECLARE_BFLOAT16_SET(products, set) ESPALIER_DECLARE_SET(set)
ESPALIER_EACH_SET(ESPALIER_DECLARE_SET)
ESPALIER_EACH_BFLOAT16_SET(ESPALIER_DECLARE_BFLOAT16_SET)
#undef ESPALIER_DECLARE_BFLOAT16_SET
#undef ESPALIER_DECLARE_SET

namespace attention {
namespace cpu {
namespace {

// Pairs of bfloat16 are taken from where keys stand, which is the plan's choice: sums of a defined order have none.
template <class T>
Kernels<T> kernels(bool in_pairs = true) {
  Kernels<T> k{};
  if constexpr (std::is_same_v<T, bfloat16>) {
    switch (in_pairs ? bfloat16_products() : Bfloat16Products::converted) {
#define ESPALIER_CASE(products, set)           \
  case Bfloat16Products::products:             \
    set::add_forward(k), set::add_backward(k); \
    return k;
      ESPALIER_EACH_BFLOAT16_SET(ESPALIER_CASE)
#undef ESPALIER_CASE
      default:
        break;
    }
  }
  ESPALIER_FOR_SET(add_forward<T>)(k);
  ESPALIER_FOR_SET(add_backward<T>)(k);
  return k;
}

// Memory of one calling thread, grown and never shrunk.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(data_); }

  void* at_least(std::size_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = 0;
      const std::size_t whole = (bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
      data_ = std::aligned_alloc(kScratchAlignment, whole);
      if (!data_) throw std::bad_alloc();
      size_ = bytes;
    }
    return data_;
  }

 private:
  void* data_ = nullptr;
  std::size_t size_ = 0;
};
Scratch& scratch() {
  static thread_local Scratch of_thread;
  return of_thread;
}

}  // namespace

}  // namespace cpu

namespace {

void check(const Shape& s) {
  ESPALIER_INTERNAL(s.query_rows >= 0 && s.own_rows >= 0 && s.path_rows >= 0, s.query_rows, " query, ", s.own_rows,
                    " own, ", s.path_rows, " path rows");
  ESPALIER_INTERNAL(s.kv_heads > 0 && s.heads > 0 && s.heads % s.kv_heads == 0 && s.head_dim > 0 && s.values() > 0,
                    s.heads, " heads over ", s.kv_heads, " key/value heads of size ", s.head_dim, " and ", s.values());
  ESPALIER_INTERNAL(s.own_rows == 0 || s.subtree_end, "subtree_end is missing");
  ESPALIER_INTERNAL(s.window >= 0 && s.window <= INT32_MAX && (s.window == 0 || s.own_rows == 0 || s.depth),
                    "depths are missing, or a window of ", s.window);
  ESPALIER_INTERNAL(s.query_rows == 0 || s.own_rows > 0, "query rows without own rows");
  ESPALIER_INTERNAL(s.query_row || s.query_rows <= s.own_rows, s.query_rows, " query rows of ", s.own_rows);
}

std::atomic<std::int64_t> least_shared_work = kLeastSharedWork;

int threads_for(const Shape& s) {
  const std::int64_t work = s.heads * (s.head_dim + s.values()) * s.query_rows * (s.path_rows + s.own_rows);
  return work < least_shared_work.load(std::memory_order_relaxed) ? 1 : omp_get_max_threads();
}

}  // namespace

void set_least_shared_work(std::int64_t multiply_adds) { least_shared_work = multiply_adds; }

template <class T>
void forward(const Shape& shape, const Inputs<T>& in, Rows<T> out, accumulator_t<T>* lse_HQ) {
  check(shape);
  if (shape.query_rows == 0) return;
  Shape whole = shape;
  whole.keys_whole = defined_sums();
  const cpu::Kernels<T> k = cpu::kernels<T>(!defined_sums());
  const int threads = threads_for(shape);
  k.forward(whole, in, out, lse_HQ, cpu::scratch().at_least(k.forward_scratch(whole, threads)), threads);
}

template <class T>
void add_backward(const Shape& shape, const Inputs<T>& in, Rows<const T> out, const accumulator_t<T>* lse_HQ,
                  Rows<const T> grad_out, const Gradients<T>& grads) {
  check(shape);
  if (shape.query_rows == 0) return;
  const cpu::Kernels<T> k = cpu::kernels<T>();
  const int threads = threads_for(shape);
  void* memory = cpu::scratch().at_least(k.backward_scratch(shape, threads));
  k.add_backward(shape, in, out, lse_HQ, grad_out, grads, memory, threads);
}

#define ESPALIER_INSTANTIATE(T)                                                                                        \
  template void forward<T>(const Shape&, const Inputs<T>&, Rows<T>, accumulator_t<T>*);                                \
  template void add_backward<T>(const Shape&, const Inputs<T>&, Rows<const T>, const accumulator_t<T>*, Rows<const T>, \
                                const Gradients<T>&)
ESPALIER_INSTANTIATE(float);
ESPALIER_INSTANTIATE(double);
ESPALIER_INSTANTIATE(bfloat16);
#undef ESPALIER_INSTANTIATE

}  // namespace attention
}  // namespace espalier
