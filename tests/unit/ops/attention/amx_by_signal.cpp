#include "tests/unit/ops/attention/amx_by_signal.h"

#include <ucontext.h>

#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace espalier::testing {
namespace {

struct Tile {
  std::uint32_t cell[16][16];
};
// Tiles as a thread sees them; with no configuration an instruction on tiles is illegal on real hardware, too.
struct State {
  bool configured = false;
  std::uint16_t row_bytes[8] = {};
  std::uint8_t rows[8] = {};
  Tile tile[8] = {};
};
thread_local State state;
std::atomic<long> count{0};

// A VEX instruction of the map 0F38 with three bytes of prefix.
struct Instruction {
  std::uint8_t opcode, mode, reg, rm, vvvv, pp;
  std::int64_t length = 5;            // prefix, opcode, ModRM
  std::uint64_t base = 0, index = 0;  // of the memory operand, the displacement is part of the base
};

std::uint64_t register_at(const ucontext_t& context, int number) {
  constexpr int kPlace[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                            REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return static_cast<std::uint64_t>(context.uc_mcontext.gregs[kPlace[number]]);
}

bool decode(const ucontext_t& context, Instruction& out) {
  const auto* code = reinterpret_cast<const std::uint8_t*>(context.uc_mcontext.gregs[REG_RIP]);
  if (code[0] != 0xc4 || (code[1] & 0x1f) != 2 || (code[2] & 0x84) != 0) return false;
  const int high_reg = code[1] & 0x80 ? 0 : 8, high_index = code[1] & 0x40 ? 0 : 8, high_base = code[1] & 0x20 ? 0 : 8;
  out.opcode = code[3];
  out.pp = code[2] & 3;
  out.vvvv = static_cast<std::uint8_t>(~(code[2] >> 3) & 15);
  out.mode = code[4] >> 6;
  out.reg = static_cast<std::uint8_t>((code[4] >> 3 & 7) + high_reg);
  out.rm = code[4] & 7;
  if (out.mode == 3) {
    out.rm = static_cast<std::uint8_t>(out.rm + high_base);
    return true;
  }
  int base = out.rm;
  if (out.rm == 4) {
    const std::uint8_t sib = code[out.length++];
    base = sib & 7;
    const int index = (sib >> 3 & 7) + high_index;
    if (index != 4) out.index = register_at(context, index) << (sib >> 6);
  }
  if (out.mode == 0 && base == 5) return false;  // an address without a base register: never formed by the kernels
  out.base = register_at(context, base + high_base);
  if (out.mode == 1) {
    out.base += static_cast<std::uint64_t>(static_cast<std::int8_t>(code[out.length++]));
  } else if (out.mode == 2) {
    std::int32_t displacement;
    std::memcpy(&displacement, code + out.length, 4);
    out.base += static_cast<std::uint64_t>(displacement);
    out.length += 4;
  }
  return true;
}

bool load_configuration(const std::uint8_t* from) {
  State next;
  next.configured = true;
  if (from[0] != 1 || from[1] != 0) return false;
  for (int i = 2; i < 64; ++i) {
    const bool used = (i >= 16 && i < 32) || (i >= 48 && i < 56);
    if (!used && from[i] != 0) return false;  // a general protection fault
  }
  std::memcpy(next.row_bytes, from + 16, 16);
  std::memcpy(next.rows, from + 48, 8);
  for (int t = 0; t < 8; ++t)
    if (next.row_bytes[t] > 64 || next.rows[t] > 16) return false;
  state = next;
  return true;
}

float upper(std::uint32_t pair) { return std::bit_cast<float>(pair & 0xffff0000u); }
float lower(std::uint32_t pair) { return std::bit_cast<float>(pair << 16); }

void multiply(int sum, int left, int right) {
  for (int r = 0; r < state.rows[sum]; ++r)
    for (int c = 0; c < state.row_bytes[sum] / 4; ++c) {
      float first = 0, second = 0;
      for (int k = 0; k < state.row_bytes[left] / 4; ++k) {
        const std::uint32_t a = state.tile[left].cell[r][k], b = state.tile[right].cell[k][c];
        first = std::fma(lower(a), lower(b), first);
        second = std::fma(upper(a), upper(b), second);
      }
      std::uint32_t& cell = state.tile[sum].cell[r][c];
      cell = std::bit_cast<std::uint32_t>(std::bit_cast<float>(cell) + (first + second));
    }
}

bool run(const Instruction& i) {
  enum : int { kNone = 0, kF3 = 2, kF2 = 3 };
  const bool memory = i.mode != 3;
  if (i.opcode == 0x49 && i.pp == kNone && memory)
    return load_configuration(reinterpret_cast<const std::uint8_t*>(i.base + i.index));
  if (!state.configured) return false;
  if (i.opcode == 0x49 && i.pp == kNone && i.reg == 0 && i.rm == 0) {
    state = State{};
    return true;
  }
  if (i.reg > 7) return false;
  Tile& tile = state.tile[i.reg];
  const std::size_t bytes = state.row_bytes[i.reg];
  if (i.opcode == 0x49 && i.pp == kF2 && !memory) {
    tile = Tile{};
    return true;
  }
  if (i.opcode == 0x4b && i.pp == kF2 && i.rm == 4 && memory) {
    tile = Tile{};
    for (std::uint64_t r = 0; r < state.rows[i.reg]; ++r)
      std::memcpy(tile.cell[r], reinterpret_cast<const void*>(i.base + r * i.index), bytes);
    return true;
  }
  if (i.opcode == 0x4b && i.pp == kF3 && i.rm == 4 && memory) {
    for (std::uint64_t r = 0; r < state.rows[i.reg]; ++r)
      std::memcpy(reinterpret_cast<void*>(i.base + r * i.index), tile.cell[r], bytes);
    return true;
  }
  if (i.opcode == 0x5c && i.pp == kF3 && !memory && i.rm < 8 && i.vvvv < 8) {
    multiply(i.reg, i.rm, i.vvvv);
    return true;
  }
  return false;
}

void on_illegal_instruction(int, siginfo_t*, void* where) {
  ucontext_t& context = *static_cast<ucontext_t*>(where);
  Instruction instruction{};
  if (!decode(context, instruction) || !run(instruction)) {
    std::signal(SIGILL, SIG_DFL);  // it is met again, without a handler
    return;
  }
  context.uc_mcontext.gregs[REG_RIP] += instruction.length;
  count.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace

AmxBySignal::AmxBySignal() {
  struct sigaction action = {};
  action.sa_sigaction = on_illegal_instruction;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGILL, &action, &before_);
  count = 0;
}

AmxBySignal::~AmxBySignal() { sigaction(SIGILL, &before_, nullptr); }

long AmxBySignal::instructions() { return count; }

}  // namespace espalier::testing
