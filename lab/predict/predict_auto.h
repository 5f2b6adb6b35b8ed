#pragma once
// predict --auto: what compress.name=auto would choose on other links and with more ranks, as tables and as a map.

#include <string>
#include <vector>

#include "train/plan/choose.h"

namespace topknot {

struct AutoReport {
  struct Run {
    std::string path;
    std::vector<NamedProfile> profiles;
  };
  struct Cell {
    std::size_t run = 0;  // of `runs`
    int ranks = 2;
    PredictedNetwork network;
    ChoiceAt at;
  };
  std::vector<Run> runs;
  std::vector<Cell> cells;               // by run, then latency and ranks, then by rising rate
  std::vector<std::string> assumptions;  // sentences
};

// Reads a run directory's auto_profiles.json, or such a file. Throws UserError that says how to make one.
std::vector<NamedProfile> read_auto_profiles(const std::string& run);

// Throws UserError as choice_at().
AutoReport predict_auto(std::vector<AutoReport::Run> runs, const std::vector<int>& ranks,
                        const std::vector<PredictedNetwork>& networks);

// The report in the formats of lab/predict/predict.h. CSV: a row for each option of each cell.
std::string auto_text(const AutoReport& report);
std::string auto_csv(const AutoReport& report);
std::string auto_json(const AutoReport& report);
std::string auto_html(const AutoReport& report);

}  // namespace topknot
