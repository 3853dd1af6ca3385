#include "espalier/serve/checkpoints.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <system_error>

#include "espalier/base/atomic_file.h"
#include "espalier/base/error.h"

namespace espalier::serve {

namespace fs = std::filesystem;

namespace {

constexpr const char* kPart = "lora";

std::int64_t bytes_of_files(const fs::path& folder) {
  std::int64_t bytes = 0;
  std::error_code ignored;
  for (fs::recursive_directory_iterator at(folder, ignored), end; at != end; at.increment(ignored))
    if (at->is_regular_file(ignored)) bytes += static_cast<std::int64_t>(at->file_size(ignored));
  return bytes;
}

std::optional<Checkpoint> read_checkpoint(const CheckpointName& name, const fs::path& folder) {
  std::ifstream in(folder / kDescription);
  std::ostringstream text;
  text << in.rdbuf();
  try {
    const Fields fields = Fields::of_body(text.str());
    Checkpoint out;
    out.name = name;
    out.base = fields.text("base_model");
    out.part = read_part(fields);
    out.created = fields.number("created", 0);
    if (fields.has("expires")) out.expires = fields.number("expires", 0);
    out.user_metadata = fields.member("user_metadata");
    out.bytes = bytes_of_files(folder);
    return out;
  } catch (const Refused&) {
  } catch (const InputError&) {
  }
  return {};
}

std::vector<fs::path> folders_in(const fs::path& folder) {
  std::vector<fs::path> out;
  std::error_code ignored;
  for (fs::directory_iterator at(folder, ignored), end; at != end; at.increment(ignored))
    if (at->is_directory(ignored)) out.push_back(at->path());
  return out;
}

}  // namespace

void write_part(Json& record, const TunedPart& part) {
  record[kPart] = {{"rank", part.rank},
                   {"seed", part.seed},
                   {"train_attn", part.attention},
                   {"train_mlp", part.mlp},
                   {"train_unembed", part.head}};
}

bool has_part(const Fields& record) { return record.has(kPart); }

TunedPart read_part(const Fields& record) {
  const Fields fields(record.object(kPart));
  TunedPart out;
  out.rank = fields.integer("rank", 1, INT32_MAX);
  const Json& seed = fields.member("seed");
  out.seed = seed.is_number_unsigned() ? seed.get<std::uint64_t>() : 0;
  out.attention = fields.flag("train_attn", true);
  out.mlp = fields.flag("train_mlp", true);
  out.head = fields.flag("train_unembed", true);
  return out;
}

void tell_part(Json& answer, const TunedPart& part, bool whole) {
  answer["is_lora"] = true;
  answer["lora_rank"] = part.rank;
  if (!whole) return;
  answer["train_unembed"] = part.head;
  answer["train_mlp"] = part.mlp;
  answer["train_attn"] = part.attention;
}

void Checkpoint::require(const std::string& of_base, TunedPart of_part) const {
  of_part.seed = part.seed;
  if (base != of_base || !(part == of_part))
    throw InputError({name.path(), "a checkpoint of the same base model and lora_config", "another one",
                      "create a client from it instead"});
}

std::string Checkpoint::description() const {
  Json json{{"tinker_path", name.path()}, {"base_model", base}, {"created", created}, {"user_metadata", user_metadata}};
  write_part(json, part);
  if (expires) json["expires"] = *expires;
  return json.dump(2);
}

Checkpoints::Checkpoints(fs::path state) : state_(std::move(state)) {
  for (const fs::path& run : folders_in(state_ / "runs"))
    for (const fs::path& kind : folders_in(run))
      for (const fs::path& folder : folders_in(kind)) {
        try {
          const CheckpointName name = checkpoint_name(run.filename(), kind.filename(), folder.filename());
          if (auto found = read_checkpoint(name, folder)) all_.push_back(std::move(*found));
        } catch (const InputError&) {  // a folder of another kind
        }
      }
  std::ranges::stable_sort(all_, {}, &Checkpoint::created);
}

fs::path Checkpoints::folder(const CheckpointName& name) const {
  return state_ / "runs" / name.run / folder_of(name.kind) / name.name;
}

const Checkpoint* Checkpoints::find(const CheckpointName& name) const {
  const auto same = [&](const Checkpoint& one) { return one.name.path() == name.path(); };
  const auto found = std::ranges::find_if(all_, same);
  return found == all_.end() ? nullptr : &*found;
}

std::vector<fs::path> Checkpoints::files(const CheckpointName& name) const {
  std::vector<fs::path> out;
  std::error_code ignored;
  for (fs::directory_iterator at(folder(name), ignored), end; at != end; at.increment(ignored))
    if (at->is_regular_file(ignored) && at->path().filename() != kDescription) out.push_back(at->path());
  std::ranges::sort(out);
  return out;
}

void Checkpoints::add(Checkpoint checkpoint) {
  std::erase_if(all_, [&](const Checkpoint& one) { return one.name.path() == checkpoint.name.path(); });
  checkpoint.bytes = bytes_of_files(folder(checkpoint.name));
  all_.push_back(std::move(checkpoint));
}

bool Checkpoints::remove(const CheckpointName& name) {
  if (find(name) == nullptr) return false;
  std::erase_if(all_, [&](const Checkpoint& one) { return one.name.path() == name.path(); });
  std::error_code ignored;
  fs::remove_all(folder(name), ignored);
  return true;
}

bool Checkpoints::set_expiry(const CheckpointName& name, std::optional<double> expires) {
  for (Checkpoint& one : all_) {
    if (one.name.path() != name.path()) continue;
    one.expires = expires;
    AtomicFile file(folder(name) / kDescription);
    file.write(one.description());
    file.commit();
    return true;
  }
  return false;
}

void Checkpoints::remove_expired(double now) {
  std::vector<CheckpointName> expired;
  for (const Checkpoint& one : all_)
    if (one.expires && *one.expires <= now) expired.push_back(one.name);
  for (const CheckpointName& name : expired) remove(name);
}

}  // namespace espalier::serve
