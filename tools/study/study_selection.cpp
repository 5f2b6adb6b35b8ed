// `study selection`: what each selector selects of recorded gradients, and what it costs over sizes.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <new>
#include <nlohmann/json.hpp>
#include <sstream>

#include "nn/core/base/check.h"
#include "nn/core/base/text.h"
#include "tools/compare/compare.h"
#include "tools/study/study.h"
#include "tools/study/study_selection.h"
#include "train/metrics/npy.h"
#include "train/metrics/run_directory.h"

namespace topknot {
namespace {

constexpr std::int64_t kLeastLog2 = 16, kFullRoundsLog2 = 22;

std::string fixed(double value, int decimals) {
  char buffer[48];
  std::snprintf(buffer, sizeof buffer, "%.*f", decimals, value);
  return buffer;
}

// Bytes that can be had without swapping; 0 where the system does not say.
std::size_t available_bytes() {
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("MemAvailable:")) {
      std::size_t kib = 0;
      std::istringstream(line.substr(13)) >> kib;
      return kib << 10;
    }
  return 0;
}

void run_quality(const StudyArguments& arguments, const std::string& out) {
  const std::string path = arguments.text("in");
  const std::vector<double> densities = arguments.numbers("densities", 1e-9, 1);
  const auto skip = static_cast<std::size_t>(arguments.integer("skip", 0, 1000000000));
  const NpyReader reader(path);
  const auto& shape = reader.shape();
  if (shape.size() != 2 || shape[0] == 0 || shape[1] == 0 || shape[1] >= std::size_t{1} << 31) {
    std::string text;
    for (const std::size_t n : shape) text += (text.empty() ? "" : ", ") + std::to_string(n);
    throw UserError("in: " + path + " has shape [" + text +
                    "]; needed is [steps, elements], as train.record_gradients writes it");
  }
  const std::size_t steps = shape[0], numel = shape[1];
  if (skip >= steps)
    throw UserError("skip is " + std::to_string(skip) + " and " + path + " has " + std::to_string(steps) +
                    " steps: none would count; lower skip or record more");
  std::printf("%zu steps of %zu elements; the first %zu fill the residual and do not count\n", steps, numel,
              skip);
  std::fflush(stdout);
  const auto rows =
      selection_quality(selection_methods(), densities, steps, numel, skip,
                        [&](std::size_t t, std::span<float> gradient) { reader.read(t * numel, gradient); });

  std::string lines, csv =
                         "selector,density,k,steps,count_mean,count_least,count_greatest,within_10_percent,"
                         "energy,energy_to_topk,threshold_median\n";
  for (const SelectionQuality& row : rows) {
    const nlohmann::ordered_json line = {{"selector", row.label},
                                         {"density", row.density},
                                         {"k", row.k},
                                         {"steps", row.steps},
                                         {"count_mean", row.count_mean},
                                         {"count_least", row.count_least},
                                         {"count_greatest", row.count_greatest},
                                         {"within_10_percent", row.within},
                                         {"energy", row.energy},
                                         {"energy_to_topk", row.energy_to_topk},
                                         {"threshold_median", row.threshold}};
    lines += line.dump() + "\n";
    csv += row.label + "," + short_text(row.density) + "," + std::to_string(row.k) + "," +
           std::to_string(row.steps);
    for (const double value : {row.count_mean, row.count_least, row.count_greatest, row.within, row.energy,
                               row.energy_to_topk, row.threshold})
      csv += "," + short_text(value);
    csv += "\n";
  }
  for (const double density : densities) {
    Table table;
    table.header = {"selector",    "selected / k", "least",          "greatest",
                    "within 10 %", "energy",       "energy / topk's"};
    std::size_t k = 0;
    for (const SelectionQuality& row : rows) {
      if (row.density != density) continue;
      k = row.k;
      table.rows.push_back({row.label, fixed(row.count_mean, 3), fixed(row.count_least, 3),
                            fixed(row.count_greatest, 3), fixed(100 * row.within, 1) + " %",
                            fixed(row.energy, 5), fixed(row.energy_to_topk, 4)});
    }
    std::printf("\ndensity %s, k = %zu\n%s", short_text(density).c_str(), k, table_text(table).c_str());
  }
  write_file(out + "/selection_quality.csv", csv);
  write_file(out + "/selection_quality.jsonl", lines);
  write_file(out + "/selection_count.svg", selection_count_plot(rows));
  write_file(out + "/selection_energy.svg", selection_energy_plot(rows));
  std::printf(
      "\nWritten: selection_quality.csv and .jsonl, selection_count.svg, selection_energy.svg in %s\n",
      out.c_str());
  std::fflush(stdout);
}

void run_cost(const StudyArguments& arguments, std::int64_t max_log2, const std::string& out) {
  const double density = arguments.numbers("density", 1e-9, 1).at(0);
  const auto rounds = arguments.integer("rounds", 1, 1000000);
  if (const auto asked = arguments.integer("threads", 0, 1024); asked > 0)
    omp_set_num_threads(static_cast<int>(asked));
  const int threads = omp_get_max_threads();
  std::vector<SelectionCost> rows;
  std::string lines, csv =
                         "selector,size,k,threads,rounds,warmup,plain_ms,step_ms,ratio,ratio_quartile_1,"
                         "ratio_quartile_3,lowest_ratio,count_per_k\n";
  for (std::int64_t log2 = kLeastLog2; log2 <= max_log2; log2 += 2) {
    const std::size_t size = std::size_t{1} << log2;
    const std::size_t needed = selection_cost_bytes(size), available = available_bytes();
    const auto skipped = [&](const std::string& why) {
      std::printf("\n2^%d elements: skipped, %s\n", static_cast<int>(log2), why.c_str());
    };
    if (available > 0 && needed > available) {
      skipped("they need " + fixed(static_cast<double>(needed) * 0x1p-30, 1) + " GiB of memory and " +
              fixed(static_cast<double>(available) * 0x1p-30, 1) + " are available");
      continue;
    }
    const std::int64_t fewer = rounds >> std::clamp<std::int64_t>(log2 - kFullRoundsLog2, 0, 30);
    const int measured = static_cast<int>(std::max(fewer, std::min<std::int64_t>(rounds, 7)));
    std::vector<SelectionCost> found;
    try {
      found = selection_cost(selection_methods(), size, density, measured, 2 * measured);
    } catch (const std::bad_alloc&) {
      skipped("memory does not suffice");
      continue;
    }
    Table table;
    table.header = {"selector", "r += g, ms", "step, ms", "ratio", "quartiles", "lowest", "selected / k"};
    for (const SelectionCost& row : found) {
      const nlohmann::ordered_json line = {{"selector", row.label},
                                           {"size", row.size},
                                           {"k", row.k},
                                           {"threads", threads},
                                           {"rounds", row.rounds},
                                           {"warmup", row.warmup},
                                           {"plain_ms", row.plain_ms},
                                           {"step_ms", row.step_ms},
                                           {"ratio", row.ratio},
                                           {"ratio_quartile_1", row.ratio_least},
                                           {"ratio_quartile_3", row.ratio_greatest},
                                           {"lowest_ratio", row.lowest_ratio},
                                           {"count_per_k", row.count}};
      lines += line.dump() + "\n";
      csv += row.label;
      for (const std::size_t value :
           {row.size, row.k, static_cast<std::size_t>(threads), static_cast<std::size_t>(row.rounds),
            static_cast<std::size_t>(row.warmup)})
        csv += "," + std::to_string(value);
      for (const double value : {row.plain_ms, row.step_ms, row.ratio, row.ratio_least, row.ratio_greatest,
                                 row.lowest_ratio, row.count})
        csv += "," + short_text(value);
      csv += "\n";
      table.rows.push_back({row.label, fixed(row.plain_ms, 3), fixed(row.step_ms, 3), fixed(row.ratio, 2),
                            fixed(row.ratio_least, 2) + " to " + fixed(row.ratio_greatest, 2),
                            fixed(row.lowest_ratio, 2), fixed(row.count, 3)});
      rows.push_back(row);
    }
    std::printf("\n2^%d elements, density %s, k = %zu, threads %d, medians of %d steps after %d\n%s",
                static_cast<int>(log2), short_text(density).c_str(), found.at(0).k, threads, measured,
                2 * measured, table_text(table).c_str());
    std::fflush(stdout);
    // After every size: the large ones take minutes, and who stops there keeps the others.
    write_file(out + "/selection_cost.csv", csv);
    write_file(out + "/selection_cost.jsonl", lines);
    write_file(out + "/selection_cost.svg", selection_cost_plot(rows));
  }
  if (rows.empty()) throw UserError("no size fits into memory; nothing was measured");
  std::printf("\nWritten: selection_cost.csv, .jsonl and .svg in %s\n", out.c_str());
}

void run_selection(const StudyArguments& arguments) {
  const std::int64_t max_log2 = arguments.integer("max_log2", 0, 30);
  if (max_log2 != 0 && max_log2 < kLeastLog2)
    throw UserError("max_log2 of study selection needs 0, or 16 to 30, not '" + arguments.text("max_log2") +
                    "'");
  if (max_log2 == 0 && arguments.text("in").empty())
    throw UserError("study selection has nothing to do: give in=gradients.npy, or max_log2 of at least 16");
  const std::string out = arguments.folder();
  if (!arguments.text("in").empty()) run_quality(arguments, out);
  if (max_log2 != 0) run_cost(arguments, max_log2, out);
}

const bool registered = [] {
  studies().add(
      "selection", "each selector: selected count and captured energy on recorded gradients; cost over sizes",
      {{{"in", "", "recorded gradients, .npy of [steps, elements], for count and energy; none: cost alone"},
        {"densities", "0.1,0.01,0.001,0.0001", "of the recorded gradients"},
        {"skip", "20", "recorded steps that fill the residual before steps count"},
        {"density", "0.001", "for the cost"},
        {"max_log2", "28", "cost at 2^16, 2^18, ... up to this many elements; 0: no cost"},
        {"rounds", "41", "measured steps up to 2^22 elements; fewer beyond, at least 7"},
        {"threads", "0", "of the cost; 0: as many as OpenMP takes"},
        {"out", "studies/selection", "folder of the .csv, .jsonl and .svg files"}},
       run_selection});
  return true;
}();

}  // namespace
}  // namespace topknot
