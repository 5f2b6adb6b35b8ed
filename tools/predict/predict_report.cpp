#include "tools/predict/predict_report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "nn/core/base/text.h"
#include "tools/compare/compare.h"
#include "tools/predict/predict_tables.h"

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
  if (!std::isfinite(value)) return "";
  char text[40];
  std::snprintf(text, sizeof text, "%.9g", value);
  return text;
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

}  // namespace

std::string source_line(const std::string& path, const ExchangeProfile& profile) {
  return path + ": " + profile.model + ", " + profile.method +
         (profile.method == "dense" ? "" : " at density " + short_text(profile.density)) + ", " +
         std::to_string(profile.ranks) + (profile.ranks == 1 ? " rank" : " ranks") + " by " +
         profile.backend + ", batch " + std::to_string(profile.batch) + " a rank";
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
    text +=
        "\nmodelled against measured, milliseconds a step (medians)\n" + table_text(judgement_table(report));
  text += "\nAssumptions:\n";
  for (const auto& line : report.assumptions) text += "  " + line + ".\n";
  return text;
}

std::string prediction_csv(const PredictReport& report) {
  std::string text = "kind,method,options,density,collective,merge,groups,ranks,rate,latency_s";
  for (const Column& column : kColumns) text += std::string(",") + column.name;
  text += "\n";
  for (const Prediction& p : report.predictions) {
    text += "modelled," + p.method + "," + p.options + "," + number(p.density) + "," + p.collective + "," +
            p.merge + "," + std::to_string(p.groups) + "," + std::to_string(p.ranks) + "," + p.network.name +
            "," + (p.network.latency ? number(*p.network.latency) : "measured");
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
