// The report page, with the parts of it that are no curves over training: cards, bars of a step's time,
// distributions.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "nn/base/text.h"
#include "tools/common/chart.h"
#include "tools/common/page.h"
#include "tools/compare/compare.h"

namespace topknot {
namespace {

// `swatches`: the first column holds the methods, in their order.
std::string table_html(const Comparison& c, const Table& table, bool swatches, const char* cls) {
  if (!swatches) return topknot::table_html(table, cls);
  return topknot::table_html(table, cls, [&](std::size_t row) { return swatch(c.styles[row]); });
}

// A key's value if all methods share it, else `several`.
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
  const bool others =
      std::ranges::any_of(c.methods, [&](const Method& o) { return &o != &m && o.baseline == i; });
  if (itself) {
    if (others) html += ", the baseline";
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

// The legend of all charts of the page.
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

// The parts of a step's time in seconds, without what ran during the computation.
std::vector<BarPart> parts_of(const StepTimes& times) {
  std::vector<BarPart> parts;
  for (const StepPart& step : kStepParts)
    if (step.part) parts.push_back({step.part, part_colour(step.part), times.*step.seconds});
  return parts;
}

// One bar per method, hidden communication below.
std::string time_bars(const Comparison& c) {
  std::vector<Bar> bars;
  for (const Method& m : c.methods)
    bars.push_back(
        {.name = m.name, .parts = parts_of(m.times), .total = m.times.total, .hidden = m.times.hidden});
  return bars_html(bars);
}

// The distribution of the accumulated gradient and the contraction of top-k.

constexpr const char* kNormalDash = "7 4";
constexpr const char* kLaplaceDash = "2 3";

struct Recorded {
  std::size_t method;
  const std::vector<DistributionRecord>* records;
};

std::vector<Recorded> recorded_methods(const Comparison& c) {
  std::vector<Recorded> result;
  for (std::size_t m = 0; m < c.methods.size(); ++m)
    for (const auto i : c.methods[m].runs)
      if (!c.runs[i].metrics.distributions.empty()) {
        result.push_back({m, &c.runs[i].metrics.distributions});
        break;
      }
  return result;
}

// Density of (u - mean) / deviation, bin by bin; gaps where a bin is empty.
std::vector<Point> measured(const DistributionRecord& r) {
  const double width =
      2 * kHistogramReach / static_cast<double>(std::max<std::size_t>(1, r.histogram.size()));
  std::vector<Point> points;
  for (std::size_t i = 0; i < r.histogram.size(); ++i) {
    const double x = -kHistogramReach + width * (static_cast<double>(i) + 0.5);
    const double share = static_cast<double>(r.histogram[i]) / static_cast<double>(r.size);
    points.push_back({x, r.histogram[i] > 0 ? share / width : kAbsent});
  }
  return points;
}

template <class Density>
std::vector<Point> fitted(double least, Density density) {
  std::vector<Point> points;
  for (double x = -kHistogramReach; x <= kHistogramReach; x += 0.05) {
    const double y = density(x);
    points.push_back({x, y >= least ? y : kAbsent});
  }
  return points;
}

std::string histograms(const Comparison& c, const Recorded& recorded) {
  const auto& records = *recorded.records;
  std::vector<std::size_t> chosen{0};
  for (const auto i : {records.size() / 2, records.size() - 1})
    if (i != chosen.back()) chosen.push_back(i);
  Scale y;
  y.label = "density";
  y.logarithmic = true;
  y.lo = 1e-6;
  y.hi = 2;
  for (const auto i : chosen)
    for (const Point& p : measured(records[i]))
      if (std::isfinite(p.y)) y.lo = std::min(y.lo, p.y / 2), y.hi = std::max(y.hi, p.y * 1.5);
  y.ticks = log_ticks(y.lo, y.hi, Unit::plain);
  std::vector<Panel> panels;
  for (const auto i : chosen) {
    const DistributionRecord& r = records[i];
    Panel panel;
    panel.x.lo = -kHistogramReach;
    panel.x.hi = kHistogramReach;
    panel.x.ticks = linear_ticks(-kHistogramReach, kHistogramReach, 8, Unit::plain);
    panel.x.label = fmt::format("step {}: standard deviations", r.step);
    if (std::isfinite(r.deviation)) panel.x.label += fmt::format(", of {:.3g} each", r.deviation);
    panel.y = y;
    constexpr double kRootTwoPi = 2.5066282746310002;
    const auto normal = [](double x) { return std::exp(-x * x / 2) / kRootTwoPi; };
    panel.lines.push_back({.points = fitted(y.lo, normal),
                           .colour = kInk,
                           .width = 1.4,
                           .dash = kNormalDash,
                           .title = "normal distribution of the same mean and deviation"});
    if (r.laplace_scale > 0 && r.deviation > 0) {
      const double scale = r.laplace_scale / r.deviation, middle = (r.median - r.mean) / r.deviation;
      const auto laplace = [&](double x) { return std::exp(-std::fabs(x - middle) / scale) / (2 * scale); };
      panel.lines.push_back({.points = fitted(y.lo, laplace),
                             .colour = kInk,
                             .width = 1.4,
                             .dash = kLaplaceDash,
                             .title = "fitted Laplace distribution"});
    }
    panel.lines.push_back({.points = measured(r),
                           .colour = c.styles[recorded.method].colour,
                           .dash = "",
                           .title = fmt::format("{}, step {}", c.methods[recorded.method].name, r.step)});
    panels.push_back(std::move(panel));
  }
  return panel_figure(panels, fmt::format("distribution{}-", recorded.method),
                      "Distribution of the accumulated gradient under " + c.methods[recorded.method].name);
}

template <class Get>
std::vector<Point> over_steps(const std::vector<DistributionRecord>& records, Get get) {
  std::vector<Point> points;
  for (const auto& r : records) points.push_back({static_cast<double>(r.step), get(r)});
  return points;
}

// `captured`: what the k largest entries hold of the energy, 1 - contraction, in place of the rest.
std::string contraction_chart(const Comparison& c, const std::vector<Recorded>& methods, bool captured) {
  const auto value = [captured](double rest) { return captured ? 1 - rest : rest; };
  Panel panel;
  double lo = kAbsent, hi = kAbsent, last = 1;
  for (const auto& m : methods) {
    const LineStyle& style = c.styles[m.method];
    const auto add = [&](double DistributionRecord::*member, const std::string& dash,
                         const std::string& title) {
      const bool solid = member == &DistributionRecord::contraction;
      Line line;
      line.points = over_steps(*m.records, [&](const DistributionRecord& r) { return value(r.*member); });
      line.colour = style.colour;
      line.dash = dash;
      line.dots = solid;
      line.width = solid ? 2 : 1.4;
      line.title = c.methods[m.method].name + ": " + title;
      for (const Point& p : line.points)
        if (std::isfinite(p.y) && (!captured || p.y > 0)) {
          lo = std::isnan(lo) ? p.y : std::min(lo, p.y);
          hi = std::isnan(hi) ? p.y : std::max(hi, p.y);
        }
      last = std::max(last, line.points.back().x);
      panel.lines.push_back(std::move(line));
    };
    add(&DistributionRecord::bound, kNormalDash, captured ? "k/d" : "1 - k/d");
    add(&DistributionRecord::bell_bound, kLaplaceDash, captured ? "1 - (1 - k/d)²" : "(1 - k/d)²");
    add(&DistributionRecord::contraction, style.dash, "measured");
  }
  if (std::isnan(lo)) return "";
  panel.x.hi = last;
  panel.x.label = "step";
  panel.x.ticks = linear_ticks(0, last, 10, Unit::plain);
  panel.y.label = captured ? "1 - contraction" : "contraction";
  panel.y.logarithmic = captured;
  const double pad = 0.06 * std::max(hi - lo, 1e-6);
  panel.y.lo = captured ? lo / 1.3 : std::max(0.0, lo - pad);
  panel.y.hi = captured ? hi * 1.3 : hi + pad;
  panel.y.ticks = captured ? log_ticks(panel.y.lo, panel.y.hi, Unit::plain)
                           : linear_ticks(panel.y.lo, panel.y.hi, 6, Unit::plain);
  return panel_figure({panel}, captured ? "captured" : "contraction",
                      captured ? "Share of the energy that the k largest entries hold"
                               : "Contraction of top-k by step, and its bounds");
}

// The records of train.distribution_every, as HTML with drawings; "" if no run has. Of each method the
// first run that has records: the histogram of its first, middle and last one against a fitted normal and a
// fitted Laplace distribution; and of all of them the contraction of top-k over steps, against both bounds.
std::string distribution_section(const Comparison& c) {
  const auto methods = recorded_methods(c);
  if (methods.empty()) return "";
  std::string html =
      "<h2>The accumulated gradient</h2><p class=\"note\">Of rank 0, gradient and residual together, before "
      "anything is taken out of it; the compressed part of the model as one vector. First, middle and last "
      "recorded step; densities logarithmic.</p>";
  // The methods' own colours stand in the legend of the page.
  html += legend_html({{"fitted normal distribution; 1 - k/d", {kInk, kNormalDash}},
                       {"fitted Laplace distribution; (1 - k/d)²", {kInk, kLaplaceDash}}},
                      {"thick, in the method's colour: measured"});
  for (const auto& m : methods)
    html += "<div class=\"chart\"><h3>" + escape(c.methods[m.method].name) + "</h3>" + histograms(c, m) +
            "</div>\n";
  html +=
      "<div class=\"chart\"><h3>Contraction of top-k</h3><p class=\"note\">What is left of ‖u‖² without its "
      "k largest entries. 1 - k/d bounds it for every u; (1 - k/d)² for bell-shaped u.</p>" +
      contraction_chart(c, methods, false) + "</div>\n";
  html +=
      "<div class=\"chart\"><h3>Captured energy</h3><p class=\"note\">The same as the share of ‖u‖² that the "
      "k largest entries hold, 1 - contraction; logarithmic, and the bounds are lower bounds here.</p>" +
      contraction_chart(c, methods, true) + "</div>\n";
  return html;
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
        network_note(c) + "</p>" + bars_legend(parts_of({}), true) + bars + "</div>" +
        table_html(c, time_table(c), true, "");

  html += distribution_section(c);

  html += "<h2>What differs</h2>";
  html += c.differing.empty() ? "<p>The runs differ in nothing but seed and folder.</p>"
                              : table_html(c, difference_table(c), false, "plain");
  html += "<h2>Every run</h2>" + table_html(c, run_table(c), false, "runs");
  html += "<p class=\"note\">Equal parameter checksums mean bit-identical weights.";
  if (has_times(c))
    html +=
        " p50 and p95: the median step and the one that 95 % of steps do not exceed; with "
        "local steps, of the means from an exchange to the next.";
  html += "</p>\n";
  return html_page("Topknot: comparison of " + count_text(static_cast<std::int64_t>(c.runs.size()), "run"),
                   html);
}

}  // namespace topknot
