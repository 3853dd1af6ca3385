// A trunk's state in the spill file: what comes back is what went away, whatever the disk does; nothing stays behind.
#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/forecast/memory_model.h"
#include "espalier/mixers/attention/shape.h"
#include "espalier/model/open_path.h"
#include "espalier/ops/operations.h"
#include "espalier/saved/sleeping_path.h"
#include "espalier/saved/sleeping_trunk.h"
#include "espalier/saved/spill_file.h"
#include "tests/device/guarded_device.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;

class Spill : public ::testing::Test {
 protected:
  Spill() : folder_(fs::temp_directory_path() / ("espalier_spill_" + std::to_string(::getpid()))) {
    fs::create_directories(folder_);
  }
  ~Spill() override { fs::remove_all(folder_); }

  bool is_empty() const { return fs::is_empty(folder_); }

  fs::path folder_;
};

std::vector<std::byte> drawn(std::size_t bytes, std::uint32_t seed) {
  std::vector<std::byte> out(bytes);
  std::mt19937 draw(seed);
  for (std::byte& one : out) one = static_cast<std::byte>(draw());
  return out;
}

// More chunks than buffers, the last one short, in the order of a backward.
TEST_F(Spill, ChunksComeBackInTheOrderAskedFor) {
  constexpr int kChunks = 7;
  SpillQueue queue(std::make_unique<SpillFile>(folder_), 2);
  std::vector<std::vector<std::byte>> contents;
  std::vector<StoredChunk> chunks(kChunks);
  queue.reserve(kChunks * kSpillChunkBytes);
  for (int i = 0; i < kChunks; ++i) {
    contents.push_back(drawn(i + 1 < kChunks ? kSpillChunkBytes : 12345, static_cast<std::uint32_t>(i)));
    chunks[i] = {i * kSpillChunkBytes, static_cast<std::int64_t>(contents[i].size()), 0};
    std::byte* const room = queue.room();
    std::memcpy(room, contents[i].data(), contents[i].size());
    queue.write(chunks[i], room);
  }
  EXPECT_TRUE(is_empty());  // the file has no name: a process that is killed now leaves nothing
  for (int i = kChunks; i-- > 0;) queue.ask(chunks[i]);
  for (int i = kChunks; i-- > 0;) {
    std::byte* const room = queue.take();
    EXPECT_EQ(std::memcmp(room, contents[i].data(), contents[i].size()), 0) << i;
    queue.give_back(room);
  }
}

// Chunks read ahead leave room for writing, and a chunk may be written again: a read gives the last write.
TEST_F(Spill, WhatIsToBeWrittenFindsRoomBesideWhatIsReadAhead) {
  SpillQueue queue(std::make_unique<SpillFile>(folder_), 3, 1);
  queue.reserve(8 * kSpillChunkBytes);
  std::vector<StoredChunk> chunks;
  for (std::int64_t i = 0; i < 8; ++i) chunks.push_back({i * kSpillChunkBytes, 100, 0});
  const auto write = [&](StoredChunk& chunk, int value) {
    std::byte* const room = queue.room();
    std::memset(room, value, static_cast<std::size_t>(chunk.bytes));
    queue.write(chunk, room);
  };
  for (int i = 0; i < 8; ++i) write(chunks[static_cast<std::size_t>(i)], i);
  for (const std::size_t i : {5, 6, 7}) queue.ask(chunks[i]);
  for (int again = 0; again < 20; ++again) {
    chunks[0].bytes = 100 + again;
    write(chunks[0], 100 + again);
  }
  for (const int i : {5, 6, 7}) {
    std::byte* const room = queue.take();
    EXPECT_EQ(static_cast<int>(room[99]), i);
    queue.give_back(room);
  }
  queue.ask(chunks[0]);
  std::byte* const room = queue.take();
  EXPECT_EQ(static_cast<int>(room[118]), 119);
  queue.give_back(room);
}

TEST_F(Spill, AFlippedBitIsAnErrorWithThePlace) {
  auto file = std::make_unique<SpillFile>(folder_);
  const int descriptor = file->descriptor();
  SpillQueue queue(std::move(file), 2);
  queue.reserve(1 << 20);
  const std::vector<std::byte> content = drawn(100000, 1);
  StoredChunk chunk{8192, 100000, 0};
  std::byte* room = queue.room();
  std::memcpy(room, content.data(), content.size());
  queue.write(chunk, room);
  queue.reserve(1);  // comes after the write
  const std::string path = "/proc/self/fd/" + std::to_string(descriptor);
  {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    ASSERT_TRUE(file);
    file.seekp(8192 + 5000);
    file.put(static_cast<char>(content[5000] ^ std::byte{4}));
  }
  queue.ask(chunk);
  try {
    queue.take();
    FAIL() << "a flipped bit went unnoticed";
  } catch (const InputError& error) {
    EXPECT_EQ(error.exit_code(), 3);
    EXPECT_NE(std::string(error.what()).find(folder_.string()), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("8192"), std::string::npos) << error.what();
  }
}

// A limit on the size of files stands for a full disk; the signal that comes with it must not end the process.
TEST_F(Spill, AFullDiskIsRefusedBeforeAnythingIsWritten) {
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit small = before;
  small.rlim_cur = 1 << 20;
  {
    SpillQueue queue(std::make_unique<SpillFile>(folder_), 1);
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
    try {
      queue.reserve(1 << 24);
      ADD_FAILURE() << "16 MiB in a file of at most one";
    } catch (const WriteError& error) {
      EXPECT_EQ(error.exit_code(), 2);
      EXPECT_NE(std::string(error.what()).find(folder_.string()), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("--spill-dir"), std::string::npos) << error.what();
    }
  }
  {
    SpillQueue queue(std::make_unique<SpillFile>(folder_), 1);
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
    queue.reserve(2 << 20);
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
    StoredChunk chunk{1 << 20, kSpillChunkBytes, 0};
    queue.write(chunk, queue.room());
    EXPECT_THROW(queue.room(), WriteError);  // the write before it failed
  }
  setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_TRUE(is_empty());
}

TEST_F(Spill, NothingIsWrittenBeyondWhatWasReserved) {
  SpillFile file(folder_);
  file.reserve(4096);
  std::byte* const room = static_cast<std::byte*>(std::aligned_alloc(4096, 8192));
  std::memset(room, 1, 8192);
  StoredChunk within{0, 4096, 0}, beyond{4096, 1, 0};
  EXPECT_NO_THROW(file.write(within, room));
  EXPECT_THROW(file.write(beyond, room), InternalError);
  std::free(room);
}

TEST_F(Spill, AFolderThatCannotBeWrittenIsNamed) {
  const fs::path file = folder_ / "file";
  std::ofstream(file) << "x";
  for (const fs::path& place : {folder_ / "gone", file, fs::path("/proc/self")}) {
    try {
      SpillFile spill(place);
      ADD_FAILURE() << place << " holds a file";
    } catch (const WriteError& error) {
      EXPECT_NE(std::string(error.what()).find(place.string()), std::string::npos) << error.what();
    }
  }
}

std::int64_t resident_pages(const at::Tensor& tensor) {
  const std::int64_t page = sysconf(_SC_PAGESIZE);
  auto* const begin = reinterpret_cast<std::byte*>(reinterpret_cast<std::uintptr_t>(tensor.data_ptr()) / page * page);
  std::vector<unsigned char> in_memory(static_cast<std::size_t>(tensor.nbytes() / page));
  EXPECT_EQ(mincore(begin, in_memory.size() * page, in_memory.data()), 0);
  return std::ranges::count_if(in_memory, [](unsigned char flags) { return flags & 1; });
}

TEST(SleepingRanges, GiveTheirPagesBackAndKeepTheirAddresses) {
  Arena arena(64 << 20, cpu_device(), 4);
  const at::Tensor below = arena.take({1000}, at::kFloat);
  const std::int64_t begin = arena.in_use();
  const at::Tensor state = arena.take({10 << 20}, at::kFloat);
  const std::int64_t end = arena.in_use();
  state.fill_(1);
  EXPECT_GT(resident_pages(state), (40 << 20) / 4096 - 4);
  arena.sleep({begin, end});
  EXPECT_LT(resident_pages(state), 4);
  EXPECT_EQ(arena.held(), begin);
  arena.reset_high_water();
  {
    const ArenaScope scope(arena);
    arena.take({12 << 20}, at::kFloat).fill_(2);  // 48 MiB beside 40 that sleep: more than the limit together
  }
  EXPECT_EQ(arena.high_water(), begin + (48 << 20));
  EXPECT_EQ(arena.touched(), begin + (48 << 20));
  arena.trim();
  EXPECT_EQ(arena.touched(), begin);
  arena.wake({begin, end});
  EXPECT_EQ(arena.held(), end);
  EXPECT_THROW(arena.wake({begin, end}), InternalError);
  arena.sleep({begin, end});
  EXPECT_THROW(arena.sleep({begin, end}), InternalError);
  arena.release_to(begin);
  EXPECT_EQ(arena.held(), begin);
  EXPECT_THROW(arena.take({17 << 20}, at::kFloat), MemoryBudgetError);
}

// Three layers of two trunks, one inside the other, on both devices and in both stores: the same bits at the same
// addresses.
TEST_F(Spill, NestedTrunksSleepAndComeBack) {
  for (Device* device : {&cpu_device(), static_cast<Device*>(&testing::guarded_device())})
    for (const bool on_host : {false, true}) {
      SCOPED_TRACE(device->name());
      Arena arena(256 << 20, *device, 2);
      std::unique_ptr<Store> store;
      if (on_host)
        store = std::make_unique<HostStore>();
      else
        store = std::make_unique<SpillFile>(folder_);
      SpillQueue queue(std::move(store), 3);
      queue.reserve(200 << 20);
      std::vector<at::Tensor> expected;
      const auto fill = [&](SleepingTrunk& trunk, DecoderSaved& saved, std::int64_t numbers,
                            std::vector<at::Tensor>& layers) {
        for (std::int64_t layer = 0; layer < 3; ++layer) {
          const std::int64_t begin = arena.in_use();
          layers.push_back(arena.take({numbers + layer}, at::kFloat));
          expected.push_back(at::randn({numbers + layer}, at::kFloat));
          device->to_device(expected.back(), layers.back());
          saved.offload.push_back({begin, arena.in_use()});
          trunk.leave({Stop::Kind::layer, Pass::forward, layer});
        }
      };
      const auto compare = [&](SleepingTrunk& trunk, const std::vector<at::Tensor>& layers) {
        for (std::int64_t layer = 2; layer >= 0; --layer) {
          trunk.enter({Stop::Kind::layer, Pass::backward, layer});
          EXPECT_TRUE(at::equal(device->to_host(layers[static_cast<std::size_t>(layer)]), expected.back())) << layer;
          expected.pop_back();
          trunk.leave({Stop::Kind::layer, Pass::backward, layer});
        }
      };
      const ArenaScope outer_scope(arena);
      std::vector<at::Tensor> outer_layers, inner_layers;
      DecoderSaved outer_saved, inner_saved;
      SleepingTrunk outer(arena, queue, outer_saved, 0);
      fill(outer, outer_saved, 3 << 20, outer_layers);
      const std::int64_t store_top = queue.store_top();
      {
        const ArenaScope scope(arena);
        SleepingTrunk inner(arena, queue, inner_saved, 0);
        fill(inner, inner_saved, 1 << 20, inner_layers);
        EXPECT_GT(queue.store_top(), store_top);
        compare(inner, inner_layers);
      }
      EXPECT_EQ(queue.store_top(), store_top);
      compare(outer, outer_layers);
      EXPECT_EQ(arena.held(), 0);
    }
}

ModelShape path_shape(std::int64_t layers) {
  ModelShape shape;
  shape.hidden = 16, shape.layer = attention_layers(layers, {.heads = 2, .kv_heads = 1, .head_dim = 8}, 0);
  return shape;
}

// Adds to a tensor through its device's own calls alone.
void add_to(const at::Tensor& tensor, const at::Tensor& added, Device& device) {
  device.to_device(device.to_host(tensor) + added, tensor);
}

// A path that sleeps and one that does not do the same: two trunks, one inside the other, three waves, every layer
// forwards and backwards, then a trunk in the place of the second. More rows than a chunk holds.
TEST_F(Spill, ASleepingPathHoldsWhatAnAwakeOneHolds) {
  constexpr std::int64_t kLayers = 4, kOuter = 17000, kInner = 300, kCapacity = kOuter + kInner;
  for (Device* device : {&cpu_device(), static_cast<Device*>(&testing::guarded_device())})
    for (const std::int64_t layers_awake : {0, 2}) {
      SCOPED_TRACE(device->name());
      const ModelShape shape = path_shape(kLayers);
      Arena arena(256 << 20, *device, 2), other(256 << 20, *device, 1);
      SpillQueue queue(store_of(*device, folder_), 3, 1);
      queue.reserve(64 << 20);
      SleepingPath keeper(arena, queue);
      const ArenaScope scope(arena), other_scope(other);
      OpenPath asleep(shape, kCapacity, at::kDouble, true, arena, &keeper, layers_awake);
      OpenPath awake(shape, kCapacity, at::kDouble, true, other);
      const std::int64_t of_layer = kCapacity * 8 * 8 * 4;
      EXPECT_EQ(arena.held(), layers_awake * of_layer);
      EXPECT_EQ(other.held(), kLayers * of_layer);
      const auto forward = [&](bool is_trunk) {
        for (std::int64_t layer = 0; layer < kLayers; ++layer) {
          const at::Tensor drawn = at::randn({asleep.path(0, asleep.rows()).k.size(0), 1, 8}, at::kDouble);
          for (OpenPath* path : {&asleep, &awake}) {
            path->begin_forward(layer);
            if (!is_trunk) continue;
            const OpenPath::Layer own = path->top(layer);
            device->to_device(drawn.narrow(0, 0, own.k.size(0)), own.k);
            device->to_device(drawn.narrow(0, 0, own.k.size(0)).neg(), own.v);
          }
          const OpenPath::Layer a = asleep.path(layer, asleep.rows()), b = awake.path(layer, awake.rows());
          EXPECT_TRUE(at::equal(device->to_host(a.k), device->to_host(b.k))) << layer;
          EXPECT_TRUE(at::equal(device->to_host(a.v), device->to_host(b.v))) << layer;
        }
      };
      const auto backward = [&](std::int64_t rows_above) {
        for (std::int64_t layer = kLayers - 1; layer >= 0; --layer) {
          const at::Tensor drawn = at::randn({rows_above, 1, 8}, at::kDouble);
          for (OpenPath* path : {&asleep, &awake}) {
            path->begin_backward(layer, rows_above);
            const OpenPath::Layer above = path->path(layer, rows_above);
            if (rows_above == 0) continue;
            add_to(above.grad_k, drawn, *device);
            add_to(above.grad_v, drawn.neg(), *device);
          }
          const OpenPath::Layer a = asleep.path(layer, asleep.rows()), b = awake.path(layer, awake.rows());
          EXPECT_TRUE(at::equal(device->to_host(a.k), device->to_host(b.k))) << layer;
          EXPECT_TRUE(at::equal(device->to_host(a.grad_k), device->to_host(b.grad_k))) << layer;
          EXPECT_TRUE(at::equal(device->to_host(a.grad_v), device->to_host(b.grad_v))) << layer;
        }
        for (OpenPath* path : {&asleep, &awake}) path->end_backward(0);
      };
      const auto push = [&](std::int64_t rows) {
        for (OpenPath* path : {&asleep, &awake}) path->push(rows, 0);
        forward(true);
      };
      const auto wave = [&] { forward(false), backward(asleep.rows()); };
      const auto pop = [&](std::int64_t rows_above) {
        backward(rows_above);
        for (OpenPath* path : {&asleep, &awake}) path->pop();
      };
      push(kOuter), wave();
      push(kInner), wave(), wave(), pop(kOuter);
      push(kInner - 7), wave(), pop(kOuter);
      wave(), pop(0);
      EXPECT_LE(arena.high_water(), (layers_awake + 1) * of_layer);
    }
}

// Reading a layer that sleeps gives no number that anybody could mistake for one.
TEST_F(Spill, ALayerThatSleepsHoldsNothing) {
  Device& device = testing::guarded_device();
  Arena arena(1 << 20, device, 2);
  SpillQueue queue(std::make_unique<HostStore>(), 3, 1);
  queue.reserve(1 << 20);
  SleepingPath keeper(arena, queue);
  const ArenaScope scope(arena);
  OpenPath path(path_shape(3), 10, at::kFloat, true, arena, &keeper, 0);
  path.push(10, 0);
  for (std::int64_t layer = 0; layer < 3; ++layer) {
    path.begin_forward(layer);
    device.to_device(at::ones({10, 1, 8}), path.top(layer).k);
    device.to_device(at::ones({10, 1, 8}), path.top(layer).v);
  }
  path.begin_backward(2, 10);
  EXPECT_TRUE(device.to_host(path.top(2).k).eq(1).all().item<bool>());
  EXPECT_TRUE(device.to_host(path.top(1).k).isnan().all().item<bool>());
  path.begin_backward(1, 10);
  EXPECT_TRUE(device.to_host(path.top(1).k).eq(1).all().item<bool>());
  EXPECT_TRUE(device.to_host(path.top(2).grad_k).isnan().all().item<bool>());
}

// A backward reads gradients that an earlier one wrote: what the disk changed in between is not added to.
TEST_F(Spill, AFlippedBitInAPathIsAnError) {
  auto file = std::make_unique<SpillFile>(folder_);
  const std::string name = "/proc/self/fd/" + std::to_string(file->descriptor());
  Arena arena(1 << 20, cpu_device(), 2);
  SpillQueue queue(std::move(file), 3, 1);
  queue.reserve(1 << 20);
  SleepingPath keeper(arena, queue);
  const ArenaScope scope(arena);
  OpenPath path(path_shape(2), 10, at::kFloat, true, arena, &keeper, 0);
  path.push(10, 0);
  const auto pass = [&] {
    for (const std::int64_t layer : {0, 1}) path.begin_forward(layer), path.top(layer).k.fill_(1);
    for (const std::int64_t layer : {1, 0}) path.begin_backward(layer, 10), path.top(layer).grad_k.fill_(2);
    path.end_backward(0);
  };
  pass();
  queue.reserve(1);  // comes after what is written
  {
    std::fstream stream(name, std::ios::in | std::ios::out | std::ios::binary);
    ASSERT_TRUE(stream);
    stream.seekp(4 * 4096 + 2 * 4096 + 5);  // gradients of keys of the second layer
    stream.put(1);
  }
  EXPECT_THROW(pass(), InputError);
}

TEST_F(Spill, ADevicesMemoryIsStoredOnTheHostAndTheHostsInAFile) {
  EXPECT_NE(dynamic_cast<SpillFile*>(store_of(cpu_device(), folder_).get()), nullptr);
  EXPECT_NE(dynamic_cast<HostStore*>(store_of(testing::guarded_device(), folder_).get()), nullptr);
  EXPECT_GT(room_to_store(testing::guarded_device(), folder_ / "gone"), 0);
  EXPECT_EQ(room_to_store(cpu_device(), folder_ / "gone"), 0);
  HostStore store;
  EXPECT_THROW(store.reserve(std::int64_t{1} << 60), MemoryBudgetError);
}

}  // namespace
}  // namespace espalier
