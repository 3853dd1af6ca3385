#include "espalier/serve/unpack.h"

#include <zstd.h>

#include <algorithm>
#include <memory>

#include "espalier/base/error.h"
#include "espalier/base/units.h"

namespace espalier::serve {
namespace {

constexpr const char* kWhere = "the body of the request";
constexpr int kLargestWindow = 27;  // 128 MiB of the reader's memory, the most that zstd takes without being asked

[[noreturn]] void refuse_size(std::int64_t most_bytes) {
  throw InputError({kWhere, text_of("at most ", format_bytes(most_bytes), " after decompression"), "more",
                    "send fewer data in a request"});
}

std::string from_zstd(std::string_view body, std::int64_t most_bytes) {
  const auto most = static_cast<std::size_t>(most_bytes);
  // Most senders state the size, and too large a one costs nothing to refuse.
  const unsigned long long stated = ZSTD_getFrameContentSize(body.data(), body.size());
  if (stated != ZSTD_CONTENTSIZE_UNKNOWN && stated != ZSTD_CONTENTSIZE_ERROR && stated > most) refuse_size(most_bytes);
  const std::unique_ptr<ZSTD_DStream, decltype(&ZSTD_freeDStream)> stream(ZSTD_createDStream(), ZSTD_freeDStream);
  ZSTD_DCtx_setParameter(stream.get(), ZSTD_d_windowLogMax, kLargestWindow);
  std::string out;
  ZSTD_inBuffer in{body.data(), body.size(), 0};
  std::size_t left = 1;  // 0: a frame has ended
  while (true) {
    const std::size_t begin = out.size();
    // One byte beyond the limit tells whether there is more.
    out.resize(std::min(std::max(2 * begin, begin + ZSTD_DStreamOutSize()), most + 1));
    ZSTD_outBuffer to{out.data() + begin, out.size() - begin, 0};
    left = ZSTD_decompressStream(stream.get(), &to, &in);
    const bool full = to.pos == to.size;
    out.resize(begin + to.pos);
    if (ZSTD_isError(left)) throw InputError({kWhere, "data that zstd can decompress", ZSTD_getErrorName(left), ""});
    if (out.size() > most) refuse_size(most_bytes);
    if (in.pos == in.size && (left == 0 || !full)) break;
  }
  if (left != 0) throw InputError({kWhere, "a whole zstd frame", "one that ends early", ""});
  return out;
}

}  // namespace

std::string_view unpack(std::string_view body, std::string_view encoding, std::int64_t most_bytes, std::string& room) {
  if (encoding.empty() || encoding == "identity") {
    if (static_cast<std::int64_t>(body.size()) > most_bytes) refuse_size(most_bytes);
    return body;
  }
  if (encoding == "zstd") return room = from_zstd(body, most_bytes);
  throw UnsupportedError({"Content-Encoding", "zstd, or none", std::string(encoding), ""});
}

}  // namespace espalier::serve
