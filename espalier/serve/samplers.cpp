#include "espalier/serve/samplers.h"

#include "espalier/serve/sessions.h"

namespace espalier::serve {

Sampler& Samplers::add(const std::string& id, const std::string& session, const std::string& base, double now) {
  Sampler& sampler = samplers_[id];
  sampler.id = id, sampler.session = session, sampler.base = base;
  sampler.created = sampler.last_used = now;
  return sampler;
}

CompletionLine& Sampler::line(std::int64_t clone) {
  const auto [entry, is_new] = lines.try_emplace(clone);
  if (is_new) entry->second.last = static_cast<std::int64_t>(seconds_since_1970() * 1e3);
  return entry->second;
}

Sampler* Samplers::find(const std::string& id) {
  const auto found = samplers_.find(id);
  return found == samplers_.end() ? nullptr : &found->second;
}

}  // namespace espalier::serve
