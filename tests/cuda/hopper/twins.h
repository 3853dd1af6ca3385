// The emulation of what only sm_90a has: behind the functions of espalier/ops/cuda/hopper/. Found in every run, with
// file and line:
//   barriers that count: too many arrivals, waits for a phase that has passed by or that another parity means, use
//     before the init is known, bytes that never come, accesses and copies to where one is; threads that wait for ever,
//     with what each waits for
//   copies of tiles: places that something still reads or writes, that threads wrote without a fence for copies, reads
//     before the barrier's phase; boxes, matrices and addresses that the copy engine refuses
//   products of a warpgroup: warps in different products, factors that are not there yet, that change while a product
//     runs or that threads wrote without a fence; results read or written before the wait; a group without a fence
//     before it, or never waited for
//   sums of two blocks to one place that no turn orders, or whose turn is passed on before they are there
//   registers: more than a block has; numbered barriers: other counts, too many threads, threads left behind
// Races in shared memory are found by clocks of threads, products and copies (clocks.h).
#pragma once

#include "tests/cuda/emulation.h"

namespace espalier::emulation {

// ---- launches ----

struct WarpgroupLaunch {
  Launch launch;
  unsigned registers = 0;  // of a thread when it starts; warpgroups hand them on
  unsigned together = 1;   // blocks that are on the GPU together, started in their order; 1: one after another, in any
};
// As run() and give(). Fault for more blocks together than the GPU holds.
void run(const WarpgroupLaunch& launch, const std::function<void()>& body);
void give(const WarpgroupLaunch& launch, std::function<void()> body);
// Blocks that the GPU holds at a time, one on each multiprocessor; at first 132. Returns the number before.
unsigned set_most_together(unsigned blocks);
unsigned most_together();

// ---- copies ----

// A matrix [rows, columns] of bfloat16 as the copy engine is told of it: boxes of box_rows rows and 64 columns, their
// 16-byte pieces swizzled within 128 bytes.
struct TensorMap {
  const std::uint16_t* data = nullptr;
  std::int64_t row_bytes = 0;  // from a row to the next one
  int rows = 0, columns = 0, box_rows = 0;
};
// cuTensorMapEncodeTiled. Returns why the driver refuses the matrix; empty where it does not.
std::string encode_tensor_map(TensorMap& map, const void* data, std::int64_t rows, std::int64_t columns,
                              std::int64_t row_bytes, int box_rows);

// From the begin of the block's dynamic shared memory, which is at a multiple of 1024.
std::uint64_t shared_address(const void* place);
void tensor_load(void* to, const TensorMap& map, void* barrier, int column, int row, Site site);
void bulk_load(void* to, const void* from, int bytes, void* barrier, Site site);
void bulk_add(float* to, const void* from, int bytes, Site site);
void bulk_commit();
void bulk_wait(int groups_left, bool until_read, Site site);
// A number in global memory by which blocks take turns.
void wait_for_number(const int* at, int value, Site site);
void add_to_number(int* at, int value, Site site);

// ---- shared memory written by threads ----

void store_matrices(void* row, const unsigned (&r)[4], bool transposed, Site site);
void async_fence();

// ---- barriers ----

void barrier_init(void* at, int arrivals, Site site);
void barrier_init_fence();
void barrier_arrive(void* at, int bytes, Site site);
void barrier_wait(void* at, unsigned parity, Site site);
void named_barrier(int id, int threads, bool waits, Site site);

// ---- products ----

struct Product {
  int n;
  bool columns_first, adds, in_registers;
  std::uint64_t a, b;
};
void product(const Product& product, float* d, const unsigned* a, Site site);
void product_fence(Site site);
void commit_products(Site site);
void wait_for_products(int groups_left, Site site);

// ---- registers ----

void change_registers(unsigned registers, bool takes, Site site);

}  // namespace espalier::emulation
