// Text on the page: sample responses, the numbers behind the curves, options and versions.
#include <algorithm>

#include "espalier/base/error.h"
#include "espalier/report/html.h"
#include "espalier/report/sections.h"

namespace espalier {
namespace {

constexpr std::size_t kMostSamples = 8, kLongText = 400, kMostRows = 200;

// A text as it is; anything else as JSON.
std::string text_at(const Json& line, const char* name) {
  if (!line.contains(name) || line[name].is_null()) return "";
  return line[name].is_string() ? line[name].get<std::string>()
                                : line[name].dump(-1, ' ', false, Json::error_handler_t::replace);
}

// The last characters of `text`, at most `bytes` of them and none cut in two.
std::string end_of(const std::string& text, std::size_t bytes) {
  std::size_t at = text.size() - std::min(text.size(), bytes);
  while (at < text.size() && (static_cast<unsigned char>(text[at]) & 0xc0) == 0x80) ++at;
  return text.substr(at);
}

std::string folded(const std::string& text) {
  if (text.size() <= kLongText) return "<pre>" + escaped(text) + "</pre>";
  return text_of("<details><summary>", text.size(), " bytes, ending in:</summary><pre>", escaped(text),
                 "</pre></details><pre class=\"tail\">&hellip;", escaped(end_of(text, kLongText / 2)), "</pre>");
}

std::string response_card(const Json& sample, const char* when) {
  std::string head = text_of("<strong>", when, "</strong> step ", sample["step"].get<std::int64_t>());
  if (const auto reward = number_at(sample, "/reward"))
    head += " <span class=\"reward " + std::string(*reward > 0 ? "good" : "none") + "\">reward " +
            shown(*reward, Unit::number) + "</span>";
  const std::string response = text_at(sample, "response");
  return "<div class=\"card\"><p>" + head + "</p>" +
         (response.empty() ? "<p class=\"note\">an empty response</p>" : folded(response)) + "</div>";
}

struct Numbers {
  const char* name;
  const char* field;
  Unit unit;
};
constexpr Numbers kColumns[] = {{"reward", "/reward", Unit::number},
                                {"accuracy", "/accuracy", Unit::percent},
                                {"loss", "/loss", Unit::number},
                                {"KL", "/kl_loss", Unit::number},
                                {"entropy", "/entropy", Unit::number},
                                {"clipped", "/clip_fraction", Unit::percent},
                                {"grad norm", "/grad_norm", Unit::number},
                                {"lr", "/lr", Unit::number},
                                {"length", "/length/mean", Unit::number},
                                {"computed", "/rows/physical", Unit::count},
                                {"unshared", "/rows/logical", Unit::count},
                                {"generate", "/seconds/generate", Unit::seconds},
                                {"score", "/seconds/score", Unit::seconds},
                                {"update", "/seconds/total", Unit::seconds}};

std::string steps_table(const std::vector<Json>& steps) {
  std::vector<Numbers> columns;
  for (const Numbers& column : kColumns)
    if (!points_of(steps, column.field).empty()) columns.push_back(column);
  std::string head = "<th scope=\"col\">step</th>", rows;
  for (const Numbers& column : columns) head.append("<th scope=\"col\">").append(column.name).append("</th>");
  const std::size_t stride = (steps.size() + kMostRows - 1) / kMostRows;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    if (i % stride != 0 && i + 1 != steps.size()) continue;
    rows += text_of("<tr><th scope=\"row\">", steps[i]["step"].get<std::int64_t>(), "</th>");
    for (const Numbers& column : columns) {
      const auto value = number_at(steps[i], column.field);
      rows += "<td>" + (value ? shown(*value, column.unit) : "") + "</td>";
    }
    rows += "</tr>\n";
  }
  return text_of("<div class=\"scroll\"><table class=\"numbers\"><thead><tr>", head, "</tr></thead><tbody>\n", rows,
                 "</tbody></table></div>",
                 stride > 1 ? text_of("<p class=\"note\">Every ", stride, ". step.</p>") : "");
}

std::string evaluations_table(const std::vector<Json>& evaluations) {
  std::string rows;
  for (const Json& line : evaluations) {
    rows += text_of("<tr><th scope=\"row\">", line["step"].get<std::int64_t>(), "</th>");
    for (const auto& [field, unit] : {std::pair("/accuracy", Unit::percent), std::pair("/reward", Unit::number)}) {
      const auto value = number_at(line, field);
      rows += "<td>" + (value ? shown(*value, unit) : "") + "</td>";
    }
    rows += "</tr>\n";
  }
  return "<table class=\"numbers\"><thead><tr><th scope=\"col\">evaluated after step</th><th "
         "scope=\"col\">accuracy</th>"
         "<th scope=\"col\">reward</th></tr></thead><tbody>\n" +
         rows + "</tbody></table>";
}

// One row for each value, named by its path.
void add_rows(const std::string& path, const Json& value, std::string& rows) {
  if (value.is_object() && !value.empty()) {
    for (const auto& [name, member] : value.items())
      add_rows(path.empty() ? name : text_of(path, ".", name), member, rows);
    return;
  }
  const std::string text =
      value.is_string() ? value.get<std::string>() : value.dump(-1, ' ', false, Json::error_handler_t::replace);
  rows += "<tr><th scope=\"row\">" + escaped(path) + "</th><td>" +
          escaped(text.size() > kLongText ? text.substr(0, text.find(' ', kLongText)) : text) + "</td></tr>\n";
}

}  // namespace

std::string samples_section(const RunRecord& run) {
  std::vector<std::pair<const Json*, const Json*>> pairs;  // first and last sample of a prompt
  for (const Json& sample : run.samples) {
    const auto same = std::find_if(pairs.begin(), pairs.end(), [&](const auto& pair) {
      return text_at(*pair.first, "prompt") == text_at(sample, "prompt");
    });
    if (same == pairs.end())
      pairs.emplace_back(&sample, &sample);
    else if (sample["step"] >= (*same->second)["step"] && sample["step"] != (*same->first)["step"])
      same->second = &sample;
  }
  // Prompts that were answered before and after tell most.
  std::stable_partition(pairs.begin(), pairs.end(), [](const auto& pair) { return pair.first != pair.second; });
  std::string out;
  for (std::size_t i = 0; i < std::min(pairs.size(), kMostSamples); ++i) {
    const auto& [before, after] = pairs[i];
    const std::string expected = text_at(*before, "expected");
    out +=
        "<article class=\"sample\"><h3>Prompt " + std::to_string(i + 1) + "</h3>" + folded(text_at(*before, "prompt"));
    if (!expected.empty()) out += "<p>expected: <code>" + escaped(expected) + "</code></p>";
    out += "<div class=\"cards\">" + response_card(*before, before == after ? "response" : "before");
    if (before != after) out += response_card(*after, "after");
    out += "</div></article>\n";
  }
  return out.empty() ? "" : "<section><h2>Sample responses</h2>\n" + out + "</section>\n";
}

std::string numbers_section(const RunRecord& run) {
  std::string out;
  if (!run.evaluations.empty()) out += evaluations_table(run.evaluations);
  if (!run.steps.empty()) out += steps_table(run.steps);
  return out.empty() ? "" : "<details class=\"fold\"><summary>Numbers of every step</summary>\n" + out + "</details>\n";
}

std::string options_section(const RunRecord& run) {
  std::string rows;
  add_rows("", run.about, rows);
  return "<details class=\"fold\"><summary>Options and versions</summary><div class=\"scroll\"><table "
         "class=\"options\">"
         "<tbody>\n" +
         rows + "</tbody></table></div></details>\n";
}

}  // namespace espalier
