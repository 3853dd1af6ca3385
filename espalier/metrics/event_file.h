// A run's numbers for TensorBoard: one event file, appended to as the run goes.
//
// Format. A record is length (8 bytes, little endian), masked CRC of those 8 bytes, the bytes, masked CRC of the bytes;
// masked(c) = ((c >> 15) | (c << 17)) + 0xa282ead8 with c the CRC-32C. A record's bytes are one Event of
// tensorflow/core/util/event.proto. The first says "brain.Event:2", the second that a session starts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

namespace espalier {

class OutputFile;

class EventFile {
 public:
  // Creates `directory` where it is absent, and in it a new file `events.out.tfevents.<unix>.<host>.<pid>.<n>`. Steps
  // of earlier files of the folder from `first_step` on are no longer shown: a run continued after step 40 passes 41.
  // Errors everywhere: OptionError where the system refuses.
  explicit EventFile(const std::filesystem::path& directory, std::int64_t first_step = 0);
  EventFile(const EventFile&) = delete;
  EventFile& operator=(const EventFile&) = delete;
  ~EventFile();  // flushes; an error then is lost

  // `value` is kept as float32, which is all that the format has for scalars; steps of a tag must not decrease.
  void scalar(std::string_view tag, std::int64_t step, double value);
  void flush();  // what was written is then seen by a TensorBoard that runs

  const std::filesystem::path& path() const;

 private:
  void event(std::int64_t step, std::string_view field);

  std::unique_ptr<OutputFile> file_;
};

// CRC-32C (polynomial 0x1edc6f41, reflected; start and final XOR are all ones).
std::uint32_t crc32c(std::string_view bytes);

}  // namespace espalier
