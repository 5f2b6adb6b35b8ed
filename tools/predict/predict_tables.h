#pragma once
// The tables of a prediction, for terminal and page.

#include <string>
#include <vector>

#include "tools/compare/compare.h"
#include "tools/predict/predict_report.h"

namespace topknot {

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
