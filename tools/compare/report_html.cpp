// The report page: one file, no network, no script.

#include <fmt/format.h>

#include <cmath>

#include "nn/core/base/text.h"
#include "tools/common/chart.h"
#include "tools/compare/compare.h"
#include "tools/compare/report_charts.h"

namespace topknot {
namespace {

constexpr const char* kStyle = R"(
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #fff; color: #1c2126; font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue",
  "DejaVu Sans", Arial, sans-serif; }
main { max-width: 1200px; margin: 0 auto; padding: 36px 28px 60px; }
h1 { font-size: 27px; line-height: 1.2; margin: 0 0 6px; letter-spacing: -0.01em; }
h2 { font-size: 19px; margin: 44px 0 6px; padding-top: 12px; border-top: 1px solid #d9dde1; }
h3 { font-size: 15px; margin: 22px 0 2px; }
p { margin: 4px 0 10px; max-width: 92ch; }
.sub { color: #59626b; margin-bottom: 22px; }
.cards { display: flex; flex-wrap: wrap; gap: 14px; margin: 18px 0 8px; }
.card { flex: 1 1 210px; border: 1px solid #d9dde1; border-top: 4px solid; border-radius: 4px; padding: 12px 16px 10px; }
.card b { display: block; font-size: 15px; overflow-wrap: anywhere; }
.card strong { display: block; font-size: 28px; line-height: 1.25; font-weight: 600; font-variant-numeric: tabular-nums; }
.card small { color: #59626b; font-size: 13px; display: block; }
table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; margin: 10px 0 6px; }
th, td { padding: 5px 11px; text-align: right; border-bottom: 1px solid #e4e7ea; white-space: nowrap; }
th { font-weight: 600; color: #3b434a; border-bottom: 1.5px solid #8a939b; vertical-align: bottom; white-space: normal; }
th:first-child, td:first-child { text-align: left; padding-left: 2px; }
td:first-child { font-weight: 600; }
table.plain td { white-space: normal; overflow-wrap: anywhere; }
table.runs { font-size: 12.5px; }
table.runs th, table.runs td { padding: 4px 7px; }
table.runs td:first-child { font-weight: 400; white-space: normal; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
i.dot { display: inline-block; width: 10px; height: 10px; border-radius: 50%; margin-right: 7px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 20px; font-size: 13.5px; margin: 6px 0 8px; color: #3b434a; }
.legend i.line { display: inline-block; width: 24px; height: 0; border-top: 3px solid; vertical-align: 4px; margin-right: 7px; }
.legend i.box { display: inline-block; width: 13px; height: 13px; vertical-align: -2px; margin-right: 6px;
  border: 1px solid #0002; }
.warning { border-left: 4px solid #e69f00; background: #fdf6e7; padding: 8px 14px; margin: 14px 0; font-size: 14px; }
.warning ul { margin: 2px 0; padding-left: 18px; }
svg { display: block; width: 100%; height: auto; font-family: inherit; }
svg { fill: #3b434a; } svg text { font-size: 12.5px; }
svg .label { font-size: 13px; fill: #1c2126; }
svg .note { font-size: 12px; fill: #59626b; }
svg .name { font-size: 13.5px; font-weight: 600; }
svg .grid { stroke: #e4e7ea; stroke-width: 1; }
svg .axis { stroke: #59626b; stroke-width: 1; }
svg .reference { stroke: #1c2126; stroke-width: 1; stroke-dasharray: 1.5 3; }
.note { color: #59626b; font-size: 13.5px; }
@media print {
  body { font-size: 11px; -webkit-print-color-adjust: exact; print-color-adjust: exact; }
  main { max-width: none; padding: 0; }
  h2 { margin-top: 22px; }
  h2, h3 { break-after: avoid; }
  svg, table, .card, .legend, .chart { break-inside: avoid; }
  .chart > svg { max-height: 58mm; } .note, .legend { font-size: 10px; margin: 2px 0 4px; }
  h3 { margin-top: 10px; }
  table { font-size: 9.5px; } th, td { padding: 3px 5px; }
  table.runs { font-size: 8.5px; } table.runs th, table.runs td { padding: 2px 4px; }
  .scroll { overflow: visible; }
}
@page { size: A4 landscape; margin: 12mm; }
)";

std::string dot(const std::string& colour) {
  return fmt::format(R"(<i class="dot" style="background:{}"></i>)", colour);
}

// `swatches`: the first column holds the methods, in their order.
std::string table_html(const Comparison& c, const Table& table, bool swatches, const char* cls) {
  if (!swatches) return topknot::table_html(table, cls);
  return topknot::table_html(table, cls, [&](std::size_t row) { return dot(method_colour(c, row)); });
}

// A key's value where all methods share it, else `several`.
std::string shared(const Comparison& c, const char* key, const std::string& several) {
  for (const Method& m : c.methods)
    if (m.config.at(key) != c.methods[0].config.at(key)) return several;
  return c.runs[c.methods[0].runs[0]].config.text(key);
}

std::string subtitle(const Comparison& c) {
  const std::string ranks = shared(c, "dist.ranks", ""), backend = shared(c, "dist.backend", ""),
                    batch = shared(c, "data.batch_size", "");
  std::string text =
      fmt::format("{} on {} · {}, {} · {}, {}", shared(c, "model.name", "several models"),
                  shared(c, "data.name", "several data sets"),
                  ranks.empty() || backend.empty()
                      ? "several numbers of ranks"
                      : fmt::format("{} rank{} ({})", ranks, ranks == "1" ? "" : "s", backend),
                  batch.empty() ? "several batch sizes" : fmt::format("batch {} per rank", batch),
                  count_text(static_cast<std::int64_t>(c.methods.size()), "method"),
                  count_text(static_cast<std::int64_t>(c.runs.size()), "run"));
  const auto& environment = c.runs[0].environment;
  if (const auto cpu = environment.find("cpu"); cpu != environment.end()) text += " · " + cpu->second;
  return text;
}

std::string card(const Comparison& c, std::size_t i) {
  const Method& m = c.methods[i];
  std::string html = fmt::format(R"(<div class="card" style="border-top-color:{}"><b>{}</b><strong>)",
                                 method_colour(c, i), escape(m.name));
  html += std::isnan(m.best.mean) ? "-"
          : c.has_accuracy        ? fmt::format("{:.1f} %", 100 * m.best.mean)
                                  : fmt::format("{:.4g}", m.best.mean);
  html += fmt::format("</strong><small>best test {}", c.has_accuracy ? "accuracy" : "loss");
  const bool itself = m.baseline && *m.baseline == i;
  if (m.baseline && !itself && c.has_accuracy) {
    const double points = 100 * (m.best.mean - c.methods[*m.baseline].best.mean);
    if (std::isfinite(points)) html += fmt::format(", {:+.1f} points against dense", points);
  }
  html += fmt::format("</small><small>{:.{}f} images/s", m.images_per_second.mean,
                      m.images_per_second.mean < 100 ? 1 : 0);
  if (itself) {
    html += ", the baseline";
  } else if (std::isfinite(m.speed_up)) {
    html += fmt::format(", {:.2f}× dense", m.speed_up);
  }
  html += fmt::format("</small><small>{} per step and rank",
                      m.bytes_per_step.count ? format_bytes(m.bytes_per_step.mean) : "-");
  if (!m.dense && m.dense_ratio >= 1.05)
    html += fmt::format(", {:.{}f}× less", m.dense_ratio, m.dense_ratio < 10 ? 1 : 0);
  html += "</small>";
  if (!m.complete) html += "<small>incomplete</small>";
  return html + "</div>";
}

std::string legend(const Comparison& c) {
  std::string html = "<div class=\"legend\">";
  bool incomplete = false, several = false;
  for (std::size_t i = 0; i < c.methods.size(); ++i) {
    const Method& m = c.methods[i];
    std::string note;
    if (m.complete && m.counted.size() > 1) note = fmt::format(" (mean of {} seeds)", m.counted.size());
    several = several || !note.empty();
    incomplete = incomplete || m.counted.size() < m.runs.size() || !m.complete;
    html += fmt::format(R"(<span><i class="line" style="border-color:{}"></i>{}{}</span>)",
                        method_colour(c, i), escape(m.name), note);
  }
  if (several) html += "<span>shaded: ± one standard deviation</span>";
  if (incomplete) html += "<span>dashed, ending in ×: an incomplete run</span>";
  return html + "</div>";
}

std::string chart(const Comparison& c, const std::string& title, const std::string& text,
                  const std::string& svg) {
  if (svg.empty()) return "";
  return "<div class=\"chart\"><h3>" + title + "</h3>" +
         (text.empty() ? "" : "<p class=\"note\">" + text + "</p>") + legend(c) + svg + "</div>\n";
}

}  // namespace

std::string report_html(const Comparison& c) {
  std::string html =
      "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">"
      "<title>Topknot: comparison of " +
      count_text(static_cast<std::int64_t>(c.runs.size()), "run") + "</title><style>" + kStyle +
      "</style></head><body><main>\n";
  html += "<h1>Gradient compression compared</h1><p class=\"sub\">" + escape(subtitle(c)) + "</p>\n";
  html += "<div class=\"cards\">";
  for (std::size_t i = 0; i < c.methods.size(); ++i) html += card(c, i);
  html += "</div>\n";
  if (!c.warnings.empty()) {
    html += "<div class=\"warning\"><b>Before you conclude</b><ul>";
    for (const auto& warning : c.warnings) html += "<li>" + escape(warning) + ".</li>";
    html += "</ul></div>\n";
  }

  html += "<h2>Results</h2>" + table_html(c, result_table(c), true, "");
  if (!std::isnan(c.target))
    html += fmt::format(
        "<p class=\"note\">Target accuracy {:.1f} %: {}; the time is that of the first evaluation "
        "at or above it. ",
        100 * c.target, escape(c.target_reason));
  else
    html += "<p class=\"note\">";
  html +=
      "Times are of training alone: evaluation and start-up are left out and stand in the table of runs. "
      "Speed-ups are over the dense run. ± is the standard deviation over seeds. <i>Compression</i>: four "
      "bytes "
      "per parameter and step, over the bytes that a rank really sent, headers included; <i>received</i> is "
      "what came "
      "from the other "
      "ranks in a step.</p>\n";

  html += "<h2>How training went</h2>";
  html += chart(c, c.has_accuracy ? "Test accuracy" : "Test loss",
                std::isnan(c.target) ? "" : "A ring marks where the mean curve first meets the target.",
                quality_chart(c));
  html +=
      chart(c, "Train loss", "Moving average over a fortieth of the run; the faint line is the loss itself.",
            loss_chart(c));
  html += chart(c, "Bytes sent", "What one rank uploads, mean over ranks; logarithmic.", bytes_chart(c));

  if (const std::string bars = time_bars(c); !bars.empty())
    html +=
        "<div class=\"chart\"><h2>Where the time of a step goes</h2><p class=\"note\">Mean over steps, the "
        "first five "
        "left out. Exposed communication is what the computation had to wait for; hidden communication ran "
        "beside "
        "it and costs no time.</p><div class=\"legend\">" +
        time_bars_legend() + "</div>" + bars + "</div>" + table_html(c, time_table(c), true, "");

  html += distribution_section(c);

  html += "<h2>What differs</h2>";
  html += c.differing.empty() ? "<p>The runs differ in nothing but seed and folder.</p>"
                              : table_html(c, difference_table(c), false, "plain");
  html += "<h2>Every run</h2>" + table_html(c, run_table(c), false, "runs");
  html +=
      "<p class=\"note\">Equal parameter checksums mean bit-identical weights. p50 and p95: the median step "
      "and the one "
      "that 95 % of steps do not exceed.</p>\n";
  return html + "</main></body></html>\n";
}

}  // namespace topknot
