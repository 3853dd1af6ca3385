// `serve`: a training server for clients of the tinker SDK.
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>

#include "cli/interrupt.h"
#include "cli/verbs.h"
#include "espalier/base/error.h"
#include "espalier/hosting/host.h"
#include "espalier/measure/machine.h"
#include "espalier/serve/http.h"
#include "espalier/serve/service.h"
#include "espalier/state/planning.h"

namespace espalier::cli {
namespace {

std::vector<std::string> read_keys(const std::string& file) {
  std::vector<std::string> keys;
  if (file.empty()) return keys;
  std::ifstream in(file);
  if (!in) throw InputError({file, "a file with keys (--api-key-file)", std::strerror(errno), ""});
  for (std::string line; std::getline(in, line);) {
    while (!line.empty() && (line.back() == ' ' || line.back() == '\r')) line.pop_back();
    if (line.empty()) continue;
    if (!line.starts_with("tml-") || line.size() < 8)
      throw InputError({file, "keys of at least eight characters that begin with tml-, one a line", "another line",
                        "the SDK refuses other keys"});
    keys.push_back(line);
  }
  if (keys.empty())
    throw InputError({file, "a key that begins with tml-", "none", "write one, as tml-$(openssl rand -hex 16)"});
  return keys;
}

bool is_loopback(const std::string& host) { return host.starts_with("127.") || host == "localhost" || host == "::1"; }

void check_address(const Options& options) {
  if (is_loopback(options.host) || !options.api_key_file.empty()) return;
  throw OptionError({"--host " + options.host, "--api-key-file: other machines can reach this address", "none",
                     "give a file with a key, or leave --host out"});
}

}  // namespace

int run_serve(Context& context) {
  const Options& options = context.options;
  check_address(options);
  serve::ServiceSettings settings;
  settings.version = ESPALIER_VERSION;
  settings.api_keys = read_keys(options.api_key_file);
  settings.state = options.state;
  settings.sync_journal = options.journal == JournalOf::sync;
  settings.save_freq = options.save_freq;
  settings.queue_bytes = std::min(settings.queue_bytes, budget_of(options).beside_held() / 8);
  settings.join_calls = options.join_calls == OnOff::on;
  serve::Service* service = nullptr;
  serve::HttpServer server(
      options.host, static_cast<int>(options.port), {},
      [&](const serve::HttpRequest& head) { return service->refuse(head); },
      [&](serve::HttpRequest request, serve::Respond respond) {
        service->handle(std::move(request), std::move(respond));
      });
  Host host(named_folders(options.model), options, machine_profile(options, context.progress), context.progress);
  serve::Service own(host, server, settings);
  service = &own;
  own.restore();
  const std::string url = text_of("http://", options.host, ":", server.port());
  context.text << "serving " << host.models().size() << (host.models().size() == 1 ? " model" : " models") << " at "
               << url << "\n"
               << "  import tinker  # TINKER_API_KEY=" << (settings.api_keys.empty() ? "tml-local" : "tml-...") << "\n"
               << "  service = tinker.ServiceClient(base_url=\"" << url << "\")\n"
               << "  training = service.create_lora_training_client(base_model=\"" << host.models().front().name
               << "\", rank=16)\n"
               << std::flush;
  set_interrupt_mode(OnInterrupt::finish);
  std::function<void()> look;
  std::shared_ptr<void> timer;
  look = [&] {
    if (received_interrupt() != 0) return server.stop();
    timer = server.after(0.1, look);
  };
  look();
  server.run();
  context.result["address"] = url;
  return 0;
}

}  // namespace espalier::cli
