// The report page.

#include <fmt/format.h>

#include <cmath>

#include "nn/base/text.h"
#include "tools/common/chart.h"
#include "tools/common/page.h"
#include "tools/compare/compare.h"
#include "tools/compare/report_charts.h"

namespace topknot {
namespace {

// `swatches`: the first column holds the methods, in their order.
std::string table_html(const Comparison& c, const Table& table, bool swatches, const char* cls) {
  if (!swatches) return topknot::table_html(table, cls);
  return topknot::table_html(table, cls, [&](std::size_t row) { return swatch(c.styles[row]); });
}

// A key's value where all methods share it, else `several`.
std::string shared(const Comparison& c, const char* key, const std::string& several) {
  for (const Run& run : c.runs)
    if (run.config.text(key) != c.runs[0].config.text(key)) return several;
  return c.runs[c.methods[0].runs[0]].config.text(key);
}

std::string subtitle(const Comparison& c) {
  const std::string methods = count_text(static_cast<std::int64_t>(c.methods.size()), "method"),
                    runs = count_text(static_cast<std::int64_t>(c.runs.size()), "run");
  // Rows of a table tell no more.
  if (!has_times(c)) return fmt::format("{} · {}, {}", c.task, methods, runs);
  std::string network = shared_network(c.methods);
  if (network.empty()) network = "several networks";
  const std::string ranks = shared(c, "dist.ranks", ""), batch = shared(c, "data.batch_size", "");
  std::string text = fmt::format(
      "{} on {} · {}, {} · {}, {}", shared(c, "model.name", "several models"), c.task,
      ranks.empty() ? fmt::format("several numbers of ranks ({})", network)
                    : fmt::format("{} rank{} ({})", ranks, ranks == "1" ? "" : "s", network),
      batch.empty() ? "several batch sizes" : fmt::format("batch {} per rank", batch), methods, runs);
  const auto& environment = c.runs[0].environment;
  if (const auto cpu = environment.find("cpu"); cpu != environment.end()) text += " · " + cpu->second;
  return text;
}

std::string card(const Comparison& c, std::size_t i) {
  const Method& m = c.methods[i];
  std::string html = fmt::format(R"(<div class="card" style="border-top-color:{}"><b>{}</b><strong>)",
                                 c.styles[i].colour, swatch(c.styles[i]) + escape(m.name));
  // A table has the last value alone.
  Stat Method::*const shown = has(c, &Method::best) ? &Method::best : &Method::last;
  html += value_text(c.metric, stat_of({(m.*shown).mean}));
  html += (shown == &Method::best ? "</strong><small>best " : "</strong><small>final ") + c.metric.title();
  const bool itself = m.baseline && *m.baseline == i;
  if (m.baseline && !itself && c.metric.unit == "share") {
    const double points = 100 * ((m.*shown).mean - (c.methods[*m.baseline].*shown).mean);
    if (std::isfinite(points)) html += fmt::format(", {:+.1f} points against dense", points);
  }
  if (!std::isnan(c.target)) {
    const std::string target = value_text(c.metric, stat_of({c.target}));
    const double seconds = m.seconds_to_target.mean;
    html += m.reached == 0
                ? "</small><small>" + target + " not reached"
                : fmt::format("</small><small>{} after {:.{}f} s", target, seconds, seconds < 10 ? 2 : 1);
    if (m.reached > 0 && m.reached < static_cast<int>(m.counted.size()))
      html += fmt::format(" ({} of {} runs)", m.reached, m.counted.size());
    if (!itself && std::isfinite(m.target_speed_up))
      html += fmt::format(", speed-up {:.2f}×", m.target_speed_up);
  }
  if (std::isfinite(m.images_per_second.mean))
    html += fmt::format("</small><small>{:.{}f} {}", m.images_per_second.mean,
                        m.images_per_second.mean < 100 ? 1 : 0, c.metric.rate_unit());
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

// Of all charts of the page.
std::string legend(const Comparison& c) {
  std::vector<LegendEntry> entries;
  bool incomplete = false, several = false;
  for (std::size_t i = 0; i < c.methods.size(); ++i) {
    const Method& m = c.methods[i];
    const bool mean = m.complete && m.counted.size() > 1;
    several = several || mean;
    incomplete = incomplete || m.counted.size() < m.runs.size() || !m.complete;
    entries.push_back(
        {m.name + (mean ? fmt::format(" (mean of {} seeds)", m.counted.size()) : ""), c.styles[i]});
  }
  std::vector<std::string> notes;
  if (several) notes.emplace_back("shaded: ± one standard deviation");
  if (incomplete) notes.emplace_back("thin, ending in ×: an incomplete run");
  return legend_html(entries, notes);
}

std::string network_note(const Comparison& c) {
  const std::string link = emulated_link(c.methods);
  return link.empty() ? "" : " The times of communication are those of an emulation: " + escape(link) + ".";
}

std::string abbreviations(const Comparison& c) {
  std::string html;
  for (const Abbreviation& a : c.abbreviations)
    html += "<p class=\"note\"><b>" + escape(a.text) + "</b>: " + escape(a.keys) + "</p>";
  return html;
}

std::string chart(const std::string& title, const std::string& text, const std::string& figure) {
  if (figure.empty()) return "";
  return "<div class=\"chart\"><h3>" + title + "</h3>" +
         (text.empty() ? "" : "<p class=\"note\">" + text + "</p>") + figure + "</div>\n";
}

}  // namespace

std::string report_html(const Comparison& c) {
  std::string html =
      "<h1>Gradient compression compared</h1><p class=\"sub\">" + escape(subtitle(c)) + "</p>\n";
  html += "<div class=\"cards\">";
  for (std::size_t i = 0; i < c.methods.size(); ++i) html += card(c, i);
  html += "</div>\n" + abbreviations(c);
  if (!c.warnings.empty()) {
    html += "<div class=\"warning\"><b>Before you conclude</b><ul>";
    for (const auto& warning : c.warnings) html += "<li>" + escape(warning) + ".</li>";
    html += "</ul></div>\n";
  }

  if (has_times(c)) html += "<h2>How training went</h2>" + legend(c);
  html += chart(c.metric.set == "test" ? "Test " + c.metric.name : "Validation " + c.metric.name,
                std::isnan(c.target) ? "" : "A ring marks where the mean curve first meets the target.",
                quality_chart(c));
  html += chart("Train loss", "Moving average over a fortieth of the run; the faint line is the loss itself.",
                loss_chart(c));
  html += chart("Bytes sent", "What one rank uploads, mean over ranks; logarithmic.", bytes_chart(c));
  html += chart("The last " + c.metric.title() + " for the bits sent",
                "Bits that a rank sends per parameter and step, mean over the run, logarithmic; dense sends "
                "32. A line joins "
                "methods that differ only in how much they send.",
                bits_chart(c));

  html += "<h2>Results</h2>" + table_html(c, result_table(c), true, "");
  if (!std::isnan(c.target))
    html += fmt::format(
        "<p class=\"note\">Target {} {}: {}; the time is that of the first evaluation "
        "that reaches it. ",
        title_of(c.metric), value_text(c.metric, stat_of({c.target})), escape(c.target_reason));
  else
    html += "<p class=\"note\">";
  if (has_times(c))
    html +=
        "Times are of training alone: evaluation and start-up are left out and stand in the table of runs. "
        "Speed-ups are over the dense run. ";
  html +=
      "± is the standard deviation over seeds. <i>Compression</i>: four "
      "bytes "
      "per parameter and step, over the bytes that a rank really sent, headers included; <i>received</i> is "
      "what came "
      "from the other "
      "ranks in a step." +
      network_note(c) + "</p>\n";

  if (const std::string bars = time_bars(c); !bars.empty())
    html +=
        "<div class=\"chart\"><h2>Where the time of a step goes</h2><p class=\"note\">Mean over steps, the "
        "first five "
        "left out. Exposed communication is what the computation had to wait for; hidden communication ran "
        "beside "
        "it and costs no time." +
        network_note(c) + "</p><div class=\"legend\">" + time_bars_legend() + "</div>" + bars + "</div>" +
        table_html(c, time_table(c), true, "");

  html += distribution_section(c);

  html += "<h2>What differs</h2>";
  html += c.differing.empty() ? "<p>The runs differ in nothing but seed and folder.</p>"
                              : table_html(c, difference_table(c), false, "plain");
  html += "<h2>Every run</h2>" + table_html(c, run_table(c), false, "runs");
  html += "<p class=\"note\">Equal parameter checksums mean bit-identical weights.";
  if (has_times(c)) html += " p50 and p95: the median step and the one that 95 % of steps do not exceed.";
  html += "</p>\n";
  return html_page("Topknot: comparison of " + count_text(static_cast<std::int64_t>(c.runs.size()), "run"),
                   html);
}

}  // namespace topknot
