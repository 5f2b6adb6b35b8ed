#include "tools/predict/predict_tables.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "nn/core/base/text.h"

namespace topknot {
namespace {

std::string format(const char* pattern, double value) {
  char text[48];
  std::snprintf(text, sizeof text, pattern, value);
  return text;
}

std::string milliseconds(double seconds) {
  const double value = 1e3 * seconds;
  return format(value < 10 ? "%.3f" : value < 1000 ? "%.1f" : "%.0f", value);
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
                             ", merge " + p.merge;
    auto at = std::find_if(curves.begin(), curves.end(), [&](const auto& c) { return c.name == name; });
    if (at == curves.end()) at = curves.insert(curves.end(), {name, {}});
    at->points.push_back(&p);
  }
  return curves;
}

Table speed_up_table(const PredictReport& report, const PredictedNetwork& network) {
  return by_ranks(report, network, [](const Prediction& p) {
    return format(p.speed_up < 10 ? "%.2f" : "%.1f", p.speed_up) + " (" + format("%.0f", 100 * p.efficiency) +
           "%)";
  });
}

Table iteration_table(const PredictReport& report, const PredictedNetwork& network) {
  return by_ranks(report, network, [](const Prediction& p) { return milliseconds(p.iteration); });
}

Table judgement_table(const PredictReport& report) {
  Table table;
  table.header = {"run",  "method",    "ranks",        "merge",        "collective",
                  "rate", "of a step", "modelled, ms", "measured, ms", "error"};
  for (const Judgement& j : report.judgements) {
    const auto& p = j.modelled;
    const auto row = [&](const char* what, double modelled, double measured) {
      const double error = relative_error(modelled, measured);
      table.rows.push_back({j.measured.path + (j.measured.replay ? " (replay)" : ""), p.method,
                            std::to_string(p.ranks), p.merge, p.collective, p.network.name, what,
                            milliseconds(modelled), milliseconds(measured),
                            std::isfinite(error) ? format("%+.1f %%", 100 * error) : "-"});
    };
    row("communicate", p.communicate, j.measured.communicate);
    row("exposed", p.exposed, j.measured.exposed);
    row("whole step", p.iteration, j.measured.step);
  }
  return table;
}

}  // namespace topknot
