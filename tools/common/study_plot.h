#pragma once
// A study's plot as an SVG file that stands by itself: a legend above a row of panels.

#include <string>
#include <utility>
#include <vector>

#include "tools/common/report_svg.h"

namespace topknot {

// `legend`: names and colours, in as many lines as they need. The panels as panel_row() wants them. `label_room`
// is added at the left, for labels of the y axis that are longer than numbers.
std::string study_plot(const std::vector<Panel>& panels,
                       const std::vector<std::pair<std::string, std::string>>& legend,
                       const std::string& description, int label_room = 0);

// The i-th colour of a study's lines; 0 is for the baseline.
std::string study_colour(std::size_t i);

}  // namespace topknot
