#include "espalier/report/page.h"

#include "espalier/base/error.h"
#include "espalier/options/options_json.h"
#include "espalier/report/html.h"
#include "espalier/report/page_style.h"
#include "espalier/report/sections.h"

namespace espalier {
namespace {

// One line of the run's description, which identifies the run.
std::string subtitle(const RunRecord& run) {
  std::string out;
  for (const auto& [field, before] : {std::pair("/espalier", "espalier "),
                                      {"/verb", ""},
                                      {"/model/architecture", ""},
                                      {"/options/model", ""},
                                      {"/options/dtype", ""},
                                      {"/machine/name", "on "},
                                      {"/started", "started "}}) {
    const Json::json_pointer pointer(field);
    if (!run.about.contains(pointer) || !run.about.at(pointer).is_string()) continue;
    const std::string text = run.about.at(pointer);
    if (!text.empty()) out += (out.empty() ? "" : " &middot; ") + escaped(before + text);
  }
  if (!run.steps.empty()) {
    const auto last = run.steps.back()["step"].get<std::int64_t>();
    out += text_of(out.empty() ? "" : " &middot; ", last, last == 1 ? " step" : " steps");
  }
  return out;
}

// The command with every option that differs from its default, as it can be typed.
std::string command(const RunRecord& run) {
  const std::string verb = run.about.value("verb", "");
  const Json options = run.about.value("options", Json::object());
  if ((verb != "train" && verb != "grpo") || !options.is_object()) return "";
  const char letter = verb == "train" ? 't' : 'l';
  const Json defaults = options_to_json(default_options(letter), letter);
  std::string out = "espalier " + verb;
  for (const OptionRow& row : option_rows()) {
    if (!row.taken_by(letter) || !options.contains(row.field) ||
        options[row.field] == defaults.value(row.field, Json()))
      continue;
    const Json& value = options[row.field];
    if (value.is_boolean()) {
      out += " --" + std::string(row.name);
      continue;
    }
    for (const Json& one : value.is_array() ? value : Json::array({value})) {
      const bool whole = one.is_number_float() && one.get<double>() == static_cast<double>(one.get<std::int64_t>());
      const std::string text = one.is_string() ? one.get<std::string>()
                               : whole         ? text_of(one.get<std::int64_t>())
                                               : one.dump();
      const bool plain = !text.empty() && text.find_first_of(" \t\n\"'$\\`(){}*?;&|<>") == std::string::npos;
      out += " --" + std::string(row.name) + " " + (plain ? text : "'" + text + "'");
    }
  }
  return "<p class=\"sub\"><code>" + escaped(out) + "</code></p>\n";
}

std::string warnings(const RunRecord& run) {
  std::string out;
  for (const std::string& note : run.notes) out += "<p class=\"warning\" role=\"note\">" + escaped(note) + "</p>\n";
  return out;
}

}  // namespace

std::string page_of(const RunRecord& run) {
  return "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
         "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
         "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
         "<title>" +
         escaped(run.name) + ", a run of Espalier</title>\n<style>" + kPageStyle +
         "</style>\n</head>\n<body>\n<header><h1>" + escaped(run.name) + "</h1>\n<p class=\"sub\">" + subtitle(run) +
         "</p>\n" + command(run) + warnings(run) + verdict_section(run) + "</header>\n<main>\n" +
         learning_section(run) + time_section(run) + memory_section(run) + plan_section(run) + samples_section(run) +
         numbers_section(run) + options_section(run) + "</main>\n</body>\n</html>\n";
}

}  // namespace espalier
