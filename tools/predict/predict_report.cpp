#include "tools/predict/predict_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

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
  json["ranks"] = p.ranks;
  json["rate"] = p.network.name;
  json["latency_s"] = p.network.latency ? Json(*p.network.latency) : Json("measured");
  for (const Column& column : kColumns) json[column.name] = p.*column.figure;
  return json;
}

std::string milliseconds(double seconds) {
  const double value = 1e3 * seconds;
  return fmt::format("{:.{}f}", value, value < 10 ? 3 : value < 1000 ? 1 : 0);
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
    return fmt::format("{:.{}f} ({:.0f}%)", p.speed_up, p.speed_up < 10 ? 2 : 1, 100 * p.efficiency);
  });
}

Table iteration_table(const PredictReport& report, const PredictedNetwork& network) {
  return by_ranks(report, network, [](const Prediction& p) { return milliseconds(p.iteration); });
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
                            milliseconds(modelled), milliseconds(measured),
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
  std::string text = "kind,method,options,density,collective,merge,groups,ranks,rate,latency_s";
  for (const Column& column : kColumns) text += std::string(",") + column.name;
  text += "\n";
  for (const Prediction& p : report.predictions) {
    text += fmt::format("modelled,{},{},{},{},{},{},{},{},{}", p.method, p.options, number(p.density),
                        p.collective, p.merge, p.groups, p.ranks, p.network.name,
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

}  // namespace topknot
