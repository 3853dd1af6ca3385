#include "espalier/metrics/event_file.h"

#include <unistd.h>

#include <array>
#include <bit>
#include <chrono>
#include <cstdio>

#include "espalier/base/atomic_file.h"
#include "espalier/base/error.h"

namespace espalier {
namespace {

constexpr std::array<std::uint32_t, 256> crc_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t rest = byte;
    for (int bit = 0; bit < 8; ++bit) rest = (rest >> 1) ^ (rest & 1 ? 0x82f63b78u : 0u);
    table[byte] = rest;
  }
  return table;
}

// The `count` low bytes of `value`, lowest first.
std::string little_endian(std::uint64_t value, int count) {
  std::string out;
  for (int i = 0; i < count; ++i) out += static_cast<char>(value >> (8 * i));
  return out;
}

std::string masked_crc(std::string_view bytes) {
  const std::uint32_t crc = crc32c(bytes);
  return little_endian(std::rotr(crc, 15) + 0xa282ead8u, 4);
}

// Protocol Buffers: a message is its fields one after the other, each a varint (number * 8 + wire type) and a value.
std::string varint(std::uint64_t value) {
  std::string out;
  for (; value >= 128; value >>= 7) out += static_cast<char>(value | 128);
  return out + static_cast<char>(value);
}

std::string integer_field(int number, std::int64_t value) {
  return varint(number * 8) + varint(static_cast<std::uint64_t>(value));
}
std::string double_field(int number, double value) {
  return varint(number * 8 + 1) + little_endian(std::bit_cast<std::uint64_t>(value), 8);
}
std::string float_field(int number, float value) {
  return varint(number * 8 + 5) + little_endian(std::bit_cast<std::uint32_t>(value), 4);
}
// A text, or a message inside the message.
std::string bytes_field(int number, std::string_view bytes) {
  return varint(number * 8 + 2) + varint(bytes.size()) + std::string(bytes);
}

// Field numbers of tensorflow/core/util/event.proto and tensorflow/core/framework/summary.proto.
enum EventField { kWallTime = 1, kStep = 2, kFileVersion = 3, kSummary = 5, kSessionLog = 7 };
enum ValueField { kTag = 1, kSimpleValue = 2 };

std::filesystem::path new_path(const std::filesystem::path& directory) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  char host[256] = "host";
  gethostname(host, sizeof host - 1);
  for (int n = 0;; ++n) {  // TensorBoard reads the files of a folder in the order of their names
    char name[400];
    std::snprintf(name, sizeof name, "events.out.tfevents.%010lld.%s.%d.%d",
                  static_cast<long long>(std::chrono::duration_cast<std::chrono::seconds>(now).count()), host,
                  static_cast<int>(getpid()), n);
    std::error_code unreadable;
    if (!std::filesystem::exists(directory / name, unreadable)) return directory / name;
  }
}

std::unique_ptr<OutputFile> new_file(const std::filesystem::path& directory) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) throw_output_error(directory, "create this folder", error.value());
  return std::make_unique<OutputFile>(new_path(directory));
}

}  // namespace

std::uint32_t crc32c(std::string_view bytes) {
  static constexpr std::array<std::uint32_t, 256> kTable = crc_table();
  std::uint32_t crc = ~0u;
  for (const char byte : bytes) crc = (crc >> 8) ^ kTable[(crc ^ static_cast<unsigned char>(byte)) & 255];
  return ~crc;
}

EventFile::EventFile(const std::filesystem::path& directory, std::int64_t first_step) : file_(new_file(directory)) {
  constexpr std::int64_t kStart = 1;  // SessionLog.SessionStatus
  event(0, bytes_field(kFileVersion, "brain.Event:2"));
  event(first_step, bytes_field(kSessionLog, integer_field(1, kStart)));
  flush();
}

EventFile::~EventFile() {
  try {
    flush();
  } catch (const Error&) {  // who must know calls flush() first
  }
}

void EventFile::scalar(std::string_view tag, std::int64_t step, double value) {
  const std::string summary_value = bytes_field(kTag, tag) + float_field(kSimpleValue, static_cast<float>(value));
  event(step, bytes_field(kSummary, bytes_field(1, summary_value)));
}

void EventFile::flush() { file_->flush(); }

const std::filesystem::path& EventFile::path() const { return file_->path(); }

void EventFile::event(std::int64_t step, std::string_view field) {
  const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
  const std::string bytes = double_field(kWallTime, now.count()) + integer_field(kStep, step) + std::string(field);
  const std::string length = little_endian(bytes.size(), 8);
  file_->write(length + masked_crc(length) + bytes + masked_crc(bytes));
}

}  // namespace espalier
