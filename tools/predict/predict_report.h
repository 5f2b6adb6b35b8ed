#pragma once
// The output of `predict`. Every figure of the model is labelled as modelled.

#include <string>
#include <vector>

#include "tools/common/table.h"
#include "tools/predict/predict.h"

namespace topknot {

struct PredictReport {
  std::vector<std::string> sources;      // one line per profile
  std::vector<std::string> assumptions;  // sentences
  std::vector<Prediction> predictions;   // by network, method and plan, then by rising ranks
  std::vector<Judgement> judgements;
};

// Sentences for PredictReport::assumptions that hold for these profiles and networks.
std::vector<std::string> assumptions_of(const std::vector<ExchangeProfile>& profiles,
                                        const std::vector<PredictedNetwork>& networks);
std::string source_line(const std::string& path, const ExchangeProfile& profile);

std::string prediction_text(const PredictReport& report);  // for a terminal
std::string prediction_csv(const PredictReport& report);   // one row per prediction, seconds
std::string prediction_json(const PredictReport& report);
std::string prediction_html(const PredictReport& report);  // self-contained: no network, no script

// A method, collective and merge plan, with its predictions over one network, by rising ranks.
struct PredictedCurve {
  std::string name;  // unique in its network: "topk 0.001, all_gather, optimal"
  std::vector<const Prediction*> points;
};

std::vector<PredictedNetwork> networks_of(const PredictReport& report);
bool same_network(const PredictedNetwork& a, const PredictedNetwork& b);
std::string network_title(const PredictedNetwork& network);  // "rate 1gbit, latency 5e-05 s"
std::vector<PredictedCurve> curves_of(const PredictReport& report, const PredictedNetwork& network);

Table speed_up_table(const PredictReport& report, const PredictedNetwork& network);
Table iteration_table(const PredictReport& report, const PredictedNetwork& network);
Table judgement_table(const PredictReport& report);

}  // namespace topknot
