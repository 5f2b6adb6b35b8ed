#pragma once
// The drawings of a comparison's report, as HTML.

#include <string>

#include "tools/compare/compare.h"

namespace topknot {

// Each against training time, epoch and step, side by side.
std::string loss_chart(const Comparison& comparison);
std::string quality_chart(const Comparison& comparison);  // of the metric; "" where nothing was evaluated
std::string quality_svg(
    const Comparison& comparison);  // the same as a file by itself; UserError in place of ""
// Of these the panel of epochs alone, for runs whose times compare nothing.
std::string epochs_svg(const Comparison& comparison);
std::string bytes_chart(const Comparison& comparison);

// The last value of the metric against the bits that a rank sends per parameter and step, means over complete runs: a point
// per method, joined where methods differ only in how much they send (density, threshold, rank, levels).
std::string bits_chart(const Comparison& comparison);  // "" where none was evaluated and sent something
std::string bits_svg(const Comparison& comparison);    // as a file by itself; UserError in place of ""

}  // namespace topknot
