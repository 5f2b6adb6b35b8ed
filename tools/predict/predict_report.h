#pragma once
// What `predict` prints and writes. Every figure of the model is labelled as modelled.

#include <string>
#include <vector>

#include "tools/predict/predict.h"

namespace topknot {

struct PredictReport {
  std::vector<std::string> sources;      // one line a profile
  std::vector<std::string> assumptions;  // sentences
  std::vector<Prediction> predictions;   // by network, method and plan, then by rising ranks
  std::vector<Judgement> judgements;
};

// Sentences for PredictReport::assumptions that hold for these profiles and networks.
std::vector<std::string> assumptions_of(const std::vector<ExchangeProfile>& profiles,
                                        const std::vector<PredictedNetwork>& networks);
std::string source_line(const std::string& path, const ExchangeProfile& profile);

std::string prediction_text(const PredictReport& report);  // for a terminal
std::string prediction_csv(const PredictReport& report);   // one row a prediction, seconds
std::string prediction_json(const PredictReport& report);
std::string prediction_html(const PredictReport& report);  // self-contained: no network, no script

}  // namespace topknot
