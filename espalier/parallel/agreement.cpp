#include "espalier/parallel/agreement.h"

#include "espalier/base/error.h"

namespace espalier {

void require_same(Group& group, const std::string& what, std::uint64_t fingerprint, const std::string& remedy) {
  const std::vector<std::uint64_t> all = numbers_of_ranks(group, fingerprint);
  std::string others;
  for (std::size_t rank = 1; rank < all.size(); ++rank)
    if (all[rank] != all.front()) others += text_of(others.empty() ? "rank " : ", ", rank);
  if (!others.empty())
    throw CommunicationError({what, "the same on every rank", "a difference from rank 0 on " + others, remedy});
}

void require_same(Group& group, const std::string& what, std::string_view text, const std::string& remedy) {
  Fingerprint fingerprint;
  fingerprint.add(text);
  require_same(group, what, fingerprint.value(), remedy);
}

}  // namespace espalier
