// A prediction as text, CSV, JSON and as a page.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "lab/predict/chart.h"
#include "lab/predict/page.h"
#include "lab/predict/predict.h"
#include "nn/base/text.h"

namespace topknot {
namespace {

using Json = nlohmann::ordered_json;

struct Column {
  const char* name;
  double Prediction::*figure;
};
constexpr Column kColumns[] = {
    {"iteration_s", &Prediction::iteration},     {"data_s", &Prediction::data},
    {"forward_s", &Prediction::forward},         {"backward_s", &Prediction::backward},
    {"encode_s", &Prediction::encode},           {"exposed_s", &Prediction::exposed},
    {"decode_s", &Prediction::decode},           {"update_s", &Prediction::update},
    {"communicate_s", &Prediction::communicate}, {"speed_up", &Prediction::speed_up},
    {"efficiency", &Prediction::efficiency}};

std::string number(double value) {
  return std::isfinite(value) ? fmt::format("{:.9g}", value) : "";
}

Json json_of(const Prediction& p) {
  Json json;
  json["modelled"] = true;
  json["method"] = p.method;
  json["options"] = p.options;
  json["density"] = p.density;
  json["collective"] = p.collective;
  json["merge"] = p.merge;
  json["groups"] = p.groups;
  json["every"] = p.every;
  json["ranks"] = p.ranks;
  json["rate"] = p.network.name;
  json["latency_s"] = p.network.latency ? Json(*p.network.latency) : Json("measured");
  for (const Column& column : kColumns) json[column.name] = p.*column.figure;
  return json;
}

template <class Cell>
Table by_ranks(const PredictReport& report, const PredictedNetwork& network, Cell cell) {
  const auto curves = curves_of(report, network);
  std::vector<int> ranks;
  for (const auto& curve : curves)
    for (const Prediction* p : curve.points)
      if (std::find(ranks.begin(), ranks.end(), p->ranks) == ranks.end()) ranks.push_back(p->ranks);
  std::sort(ranks.begin(), ranks.end());
  Table table;
  table.header = {"ranks"};
  for (const int count : ranks) table.header.push_back(std::to_string(count));
  for (const auto& curve : curves) {
    std::vector<std::string> row{curve.name};
    for (const int count : ranks) {
      const auto at = std::find_if(curve.points.begin(), curve.points.end(),
                                   [&](const Prediction* p) { return p->ranks == count; });
      row.push_back(at == curve.points.end() ? "" : cell(**at));
    }
    table.rows.push_back(row);
  }
  return table;
}

// Powers of two, every second or fourth if there are many.
Scale binary_scale(double lo, double hi, const std::string& label) {
  Scale scale;
  scale.logarithmic = true;
  scale.lo = lo;
  scale.hi = hi;
  scale.label = label;
  const double first = std::floor(std::log2(lo) + 1e-9), last = std::log2(hi);
  const double stride = last - first > 12 ? 4 : last - first > 6 ? 2 : 1;
  for (double e = std::max(first, -20.0); e <= last + 1e-9; e += stride)
    if (std::exp2(e) >= lo * 0.999) scale.ticks.push_back({std::exp2(e), short_text(std::exp2(e))});
  return scale;
}

double most_ranks(const PredictReport& report) {
  double most = 2;
  for (const Prediction& p : report.predictions) most = std::max(most, static_cast<double>(p.ranks));
  return most;
}

Scale speed_up_scale(const PredictReport& report) {
  double least = 1;
  for (const Prediction& p : report.predictions) least = std::min(least, p.speed_up);
  return binary_scale(least * 0.93, most_ranks(report) * 1.15, "modelled speed-up");
}

Scale efficiency_scale() {
  Scale scale;
  scale.lo = 0, scale.hi = 1.03, scale.label = "modelled efficiency";
  scale.ticks = linear_ticks(0, 1, 5, Unit::percent), scale.unit = Unit::percent;
  return scale;
}

// The curves of all networks, by name: one style each, the same in all panels.
std::vector<LegendEntry> legend_of(const PredictReport& report) {
  std::vector<LegendEntry> legend;
  std::vector<PlannedMethod> lines;
  for (const auto& network : networks_of(report))
    for (const auto& curve : curves_of(report, network)) {
      if (std::any_of(legend.begin(), legend.end(),
                      [&](const auto& known) { return known.name == curve.name; }))
        continue;
      legend.push_back({curve.name, {}});
      lines.push_back({curve.points.front()->method, curve.points.front()->merge});
    }
  const std::vector<LineStyle> styles = line_styles(lines);
  for (std::size_t i = 0; i < legend.size(); ++i) legend[i].style = styles[i];
  return legend;
}

const LineStyle& style_of(const std::vector<LegendEntry>& legend, const std::string& name) {
  return std::find_if(legend.begin(), legend.end(), [&](const auto& known) { return known.name == name; })
      ->style;
}

const LineStyle kLinear{kInk, "1.5 4"};

// A panel per network, `figure` against ranks, with a dotted line for linear scaling.
std::string charts(const PredictReport& report, const std::vector<LegendEntry>& legend,
                   double Prediction::*figure, const Scale& y, const std::vector<Point>& linear) {
  std::vector<Panel> panels;
  for (const auto& network : networks_of(report)) {
    Panel panel;
    panel.x = binary_scale(1, most_ranks(report) * 1.08, "ranks\n" + network_title(network));
    panel.y = y;
    panel.lines.push_back({.points = linear,
                           .colour = kLinear.colour,
                           .width = 1,
                           .opacity = 0.6,
                           .dash = kLinear.dash,
                           .title = ""});
    for (const auto& curve : curves_of(report, network)) {
      Line line = line_of(style_of(legend, curve.name), curve.name + " (modelled)");
      for (const Prediction* p : curve.points)
        line.points.push_back({static_cast<double>(p->ranks), p->*figure});
      line.dots = true;
      panel.lines.push_back(line);
    }
    panels.push_back(panel);
  }
  return panel_figure(panels, y.logarithmic ? "speed" : "efficiency", y.label + " against ranks");
}

}  // namespace

bool same_network(const PredictedNetwork& a, const PredictedNetwork& b) {
  return a.name == b.name && a.latency == b.latency;
}

std::vector<PredictedNetwork> networks_of(const PredictReport& report) {
  std::vector<PredictedNetwork> networks;
  for (const Prediction& p : report.predictions)
    if (std::none_of(networks.begin(), networks.end(),
                     [&](const PredictedNetwork& n) { return same_network(n, p.network); }))
      networks.push_back(p.network);
  return networks;
}

std::string network_title(const PredictedNetwork& network) {
  return "rate " + network.name + ", latency " +
         (network.latency ? short_text(*network.latency) + " s" : "measured");
}

std::vector<PredictedCurve> curves_of(const PredictReport& report, const PredictedNetwork& network) {
  std::vector<PredictedCurve> curves;
  for (const Prediction& p : report.predictions) {
    if (!same_network(p.network, network)) continue;
    // Resolved from auto, the collective may differ from one number of ranks to the next.
    const std::string name = p.method + (p.method == "dense" ? "" : " " + short_text(p.density)) +
                             (p.options.empty() ? "" : " " + p.options) +
                             (p.asked_collective == "all_gather" ? "" : ", " + p.asked_collective) +
                             ", merge " + p.merge + (p.every > 0 ? ", every " + std::to_string(p.every) : "");
    auto at = std::find_if(curves.begin(), curves.end(), [&](const auto& c) { return c.name == name; });
    if (at == curves.end()) at = curves.insert(curves.end(), {name, {}});
    at->points.push_back(&p);
  }
  return curves;
}

std::string in_milliseconds(double seconds) {
  const double value = 1e3 * seconds;
  return fmt::format("{:.{}f}", value, value < 10 ? 3 : value < 1000 ? 1 : 0);
}

Table speed_up_table(const PredictReport& report, const PredictedNetwork& network) {
  return by_ranks(report, network, [](const Prediction& p) {
    return fmt::format("{:.{}f} ({:.0f}%)", p.speed_up, p.speed_up < 10 ? 2 : 1, 100 * p.efficiency);
  });
}

Table iteration_table(const PredictReport& report, const PredictedNetwork& network) {
  return by_ranks(report, network, [](const Prediction& p) { return in_milliseconds(p.iteration); });
}

Table judgement_table(const PredictReport& report) {
  Table table;
  table.header = {"run",  "method", "ranks",        "merge",        "collective",
                  "rate", "part",   "modelled, ms", "measured, ms", "error"};
  for (const Judgement& j : report.judgements) {
    const auto& p = j.modelled;
    const auto row = [&](const char* what, double modelled, double measured) {
      const double error = relative_error(modelled, measured);
      table.rows.push_back({j.measured.path + (j.measured.replay ? " (replay)" : ""), p.method,
                            std::to_string(p.ranks), p.merge, p.collective, p.network.name, what,
                            in_milliseconds(modelled), in_milliseconds(measured),
                            std::isfinite(error) ? fmt::format("{:+.1f} %", 100 * error) : "-"});
    };
    row("communicate", p.communicate, j.measured.communicate);
    row("exposed", p.exposed, j.measured.exposed);
    row("whole step", p.iteration, j.measured.step);
  }
  return table;
}

std::string source_line(const std::string& path, const ExchangeProfile& profile) {
  return fmt::format("{}: {}, {}{}, {} by {}, batch {} per rank", path, profile.model, profile.method,
                     profile.method == "dense" ? "" : fmt::format(" at density {:g}", profile.density),
                     count_text(profile.ranks, "rank"), profile.backend, profile.batch);
}

std::vector<std::string> assumptions_of(const std::vector<ExchangeProfile>& profiles,
                                        const std::vector<PredictedNetwork>& networks) {
  std::vector<std::string> lines{
      "Each rank keeps its batch and has a machine and a link of its own; all compute equally fast. "
      "Speed-up is P T(1) / T(P); T(1) is data, forward, backward and update, without compression",
      "The latency of a gather of P ranks is the measured one plus, for each further rank, what one more "
      "message adds (from a profile of two ranks: its whole latency again); its bytes take (P-1) times one "
      "rank's",
      "Decoding grows with the entries that arrive; writing an element of the average counts as " +
          short_text(kElementWeight) + " of an entry. Encoding and computation are as measured"};
  for (const PredictedNetwork& network : networks)
    if (network.bits_per_s) {
      lines.push_back("A given rate is nominal, " + short_text(network.efficiency) +
                      " of it reaches the payload; collectives run beside the backward pass");
      break;
    }
  bool derived = false;
  for (const ExchangeProfile& profile : profiles) {
    derived = derived || profile.method != "dense";
    if (profile.backend == "threads")
      lines.push_back("The profile of " + profile.method +
                      " comes from threads of one process: its latency is that of memory, not of a network "
                      "(--latency sets one)");
    if (profile.ranks > 1 && profile.gather.beta == 0 && !profile.sums)
      lines.push_back("The profile of " + profile.method +
                      " shows no cost per byte: its measured rate is without limit (--rate sets one)");
  }
  if (derived)
    lines.push_back(
        "Where dense has no profile of its own, it is a ring over the measured link whose "
        "decoding costs nothing");
  return lines;
}

std::string prediction_text(const PredictReport& report) {
  std::string text = "MODELLED from measured profiles, not measured. Profiles:\n";
  for (const auto& line : report.sources) text += "  " + line + "\n";
  for (const PredictedNetwork& network : networks_of(report)) {
    text += "\n" + network_title(network) + "\n\nmodelled speed-up over one rank (and scaling efficiency)\n" +
            table_text(speed_up_table(report, network)) + "\nmodelled iteration time, milliseconds\n" +
            table_text(iteration_table(report, network));
  }
  if (!report.judgements.empty())
    text += "\nmodelled against measured, milliseconds per step (medians)\n" +
            table_text(judgement_table(report));
  text += "\nAssumptions:\n";
  for (const auto& line : report.assumptions) text += "  " + line + ".\n";
  return text;
}

std::string prediction_csv(const PredictReport& report) {
  std::string text = "kind,method,options,density,collective,merge,groups,every,ranks,rate,latency_s";
  for (const Column& column : kColumns) text += std::string(",") + column.name;
  text += "\n";
  for (const Prediction& p : report.predictions) {
    text += fmt::format("modelled,{},{},{},{},{},{},{},{},{},{}", p.method, p.options, number(p.density),
                        p.collective, p.merge, p.groups, p.every, p.ranks, p.network.name,
                        p.network.latency ? number(*p.network.latency) : "measured");
    for (const Column& column : kColumns) text += "," + number(p.*column.figure);
    text += "\n";
  }
  return text;
}

std::string prediction_json(const PredictReport& report) {
  Json json;
  json["note"] = "every figure in predictions is modelled, none is measured; seconds";
  json["profiles"] = report.sources;
  json["assumptions"] = report.assumptions;
  json["predictions"] = Json::array();
  for (const Prediction& p : report.predictions) json["predictions"].push_back(json_of(p));
  json["measured"] = Json::array();
  for (const Judgement& j : report.judgements) {
    Json row;
    row["run"] = j.measured.path;
    row["replay"] = j.measured.replay;
    const auto figure = [&](const char* name, double modelled, double measured) {
      row[name]["modelled"] = modelled;
      row[name]["measured"] = measured;
      const double error = relative_error(modelled, measured);
      row[name]["error"] = std::isfinite(error) ? Json(error) : Json(nullptr);
    };
    figure("communicate_s", j.modelled.communicate, j.measured.communicate);
    figure("exposed_s", j.modelled.exposed, j.measured.exposed);
    figure("step_s", j.modelled.iteration, j.measured.step);
    row["setting"] = json_of(j.modelled);
    json["measured"].push_back(row);
  }
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string prediction_html(const PredictReport& report) {
  const auto networks = networks_of(report);
  const double most = most_ranks(report);
  std::vector<LegendEntry> legend = legend_of(report);
  const std::vector<LegendEntry> curves = legend;
  legend.push_back({"linear", kLinear});
  std::string html =
      "<h1>Modelled scaling</h1><p class=\"warning\">Every figure here is <b>modelled</b> from measured "
      "profiles";
  html += report.judgements.empty() ? ".</p>" : ", but for the columns named measured.</p>";
  html += "<ul>";
  for (const auto& line : report.sources) html += "<li>" + escape(line) + "</li>";
  html += "</ul>\n<h2>Speed-up over one rank, modelled</h2>" + legend_html(legend) +
          charts(report, curves, &Prediction::speed_up, speed_up_scale(report), {{1, 1}, {most, most}}) +
          "<h2>Scaling efficiency, modelled</h2>" +
          charts(report, curves, &Prediction::efficiency, efficiency_scale(), {{1, 1}, {most, 1}});
  if (!report.judgements.empty())
    html += "<h2>The model against measured runs</h2><p>Milliseconds per step, medians.</p>" +
            table_html(judgement_table(report));
  for (const auto& network : networks) {
    const auto rows = curves_of(report, network);
    const auto mark = [&](std::size_t row) { return swatch(style_of(curves, rows[row].name)); };
    html += "<h2>" + escape(network_title(network)) + "</h2><h3>Modelled speed-up (scaling efficiency)</h3>" +
            table_html(speed_up_table(report, network), nullptr, mark) +
            "<h3>Modelled iteration time, milliseconds</h3>" +
            table_html(iteration_table(report, network), nullptr, mark);
  }
  html += "<h2>What the model assumes</h2><ul>";
  for (const auto& line : report.assumptions) html += "<li>" + escape(line) + ".</li>";
  return html_page("Topknot: modelled scaling", html + "</ul>");
}

}  // namespace topknot
