#include "lab/predict/predict_auto.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "lab/predict/chart.h"
#include "lab/predict/page.h"
#include "lab/predict/predict.h"
#include "nn/base/check.h"
#include "nn/base/file.h"
#include "nn/base/text.h"
#include "train/plan/plan.h"

namespace topknot {
namespace {

using Cell = AutoReport::Cell;

// The options of all runs, each by a letter.
struct Lettered {
  std::string name, colour;
};
std::vector<Lettered> lettered(const AutoReport& report) {
  std::vector<Lettered> options;
  std::vector<std::string> methods;
  for (const Cell& cell : report.cells)
    for (const ChoiceAt::Option& option : cell.at.options)
      if (std::ranges::find(options, option.name, &Lettered::name) == options.end())
        options.push_back({option.name, ""}), methods.push_back(option.method);
  const std::vector<std::string> colours = area_colours(methods);
  for (std::size_t i = 0; i < options.size(); ++i) options[i].colour = colours[i];
  return options;
}

std::size_t place_of(const std::vector<Lettered>& options, const std::string& name) {
  return static_cast<std::size_t>(std::ranges::find(options, name, &Lettered::name) - options.begin());
}

char letter(std::size_t place) {
  return static_cast<char>('A' + place);
}

std::string titled(const Lettered& option, std::size_t place) {
  return fmt::format("{} {}", letter(place), option.name);
}

std::string gain_text(const ChoiceAt& at) {
  return at.taken == 0 ? "" : fmt::format("{:.{}f}x", at.gain(), at.gain() < 2 ? 2 : at.gain() < 10 ? 1 : 0);
}

// The options that auto would try in addition to its choice: "+AC".
std::string besides(const ChoiceAt& at, const std::vector<Lettered>& options) {
  std::string text;
  for (std::size_t i = 0; i < at.options.size(); ++i)
    if (at.options[i].tried && i != at.taken) text += letter(place_of(options, at.options[i].name));
  return text.empty() ? "" : "+" + text;
}

std::string latency_text(const PredictedNetwork& network) {
  return network.latency ? short_text(1e6 * *network.latency) + " us" : "as measured";
}

// The cells of one run with one latency, which make one map.
std::vector<std::vector<const Cell*>> maps_of(const AutoReport& report) {
  std::vector<std::vector<const Cell*>> maps;
  for (const Cell& cell : report.cells) {
    const Cell* last = maps.empty() ? nullptr : maps.back().front();
    if (!last || last->run != cell.run || last->network.latency != cell.network.latency) maps.emplace_back();
    maps.back().push_back(&cell);
  }
  return maps;
}

std::string map_title(const AutoReport& report, const Cell& cell) {
  const AutoReport::Run& run = report.runs[cell.run];
  return fmt::format("{}: {}, latency {}", run.path, run.profiles[0].profile.model,
                     latency_text(cell.network));
}

Table map_table(const std::vector<const Cell*>& map, const std::vector<Lettered>& options) {
  Table table;
  table.header = {"ranks"};
  for (const Cell* cell : map) {
    if (cell->ranks == map[0]->ranks) table.header.push_back(cell->network.name);
    if (table.rows.empty() || table.rows.back()[0] != std::to_string(cell->ranks))
      table.rows.push_back({std::to_string(cell->ranks)});
    std::string text(1, letter(place_of(options, cell->at.choice().name)));
    for (const std::string& more : {gain_text(cell->at), besides(cell->at, options)})
      if (!more.empty()) text += " " + more;
    table.rows.back().push_back(text);
  }
  return table;
}

Table choice_table(const std::vector<const Cell*>& map, const std::vector<Lettered>& options) {
  Table table;
  table.header = {"ranks", "rate", "takes", "a step, ms", "dense's step, ms", "gain", "would try besides"};
  for (const Cell* cell : map)
    table.rows.push_back({std::to_string(cell->ranks), cell->network.name, cell->at.choice().name,
                          in_milliseconds(cell->at.choice().step_s),
                          in_milliseconds(cell->at.options[0].step_s), gain_text(cell->at),
                          besides(cell->at, options)});
  return table;
}

// Half-way to the neighbours on a logarithmic axis, and as far beyond the ends.
std::vector<double> edges(const std::vector<double>& values) {
  std::vector<double> result;
  for (std::size_t i = 1; i < values.size(); ++i) result.push_back(std::sqrt(values[i - 1] * values[i]));
  constexpr double kAlone = 2;
  const double first = result.empty() ? kAlone : result.front() / values.front(),
               last = result.empty() ? kAlone : values.back() / result.back();
  result.insert(result.begin(), values.front() / first);
  result.push_back(values.back() * last);
  return result;
}

std::string rate_text(double bits_per_s) {
  for (const auto& [unit, name] : {std::pair(1e9, "G"), {1e6, "M"}, {1e3, "k"}})
    if (bits_per_s >= unit) return short_text(bits_per_s / unit) + name;
  return short_text(bits_per_s);
}

template <class Label>
Scale axis(const std::vector<double>& values, const std::string& label, const Label& text) {
  constexpr std::size_t kMostTicks = 8;
  Scale scale;
  scale.logarithmic = true;
  scale.lo = edges(values).front(), scale.hi = edges(values).back();
  scale.label = label;
  const std::size_t stride = (values.size() + kMostTicks - 1) / kMostTicks;
  for (std::size_t i = 0; i < values.size(); i += stride) scale.ticks.push_back({values[i], text(values[i])});
  return scale;
}

// A map for each, of the rates that are numbers.
std::string maps_html(const AutoReport& report, const std::vector<Lettered>& options) {
  std::vector<Panel> panels;
  for (const auto& map : maps_of(report)) {
    std::vector<double> rates, ranks;
    for (const Cell* cell : map) {
      if (!cell->network.bits_per_s) continue;
      rates.push_back(*cell->network.bits_per_s), ranks.push_back(cell->ranks);
    }
    if (rates.empty()) continue;
    for (auto* values : {&rates, &ranks}) {
      std::ranges::sort(*values);
      values->erase(std::unique(values->begin(), values->end()), values->end());
    }
    Panel panel;
    panel.x = axis(rates, "bit/s of a rank's link\n" + map_title(report, *map[0]), rate_text);
    panel.y = axis(ranks, "ranks", short_text);
    const auto cut = [](const std::vector<double>& values, double value) {
      const auto at = static_cast<std::size_t>(std::ranges::find(values, value) - values.begin());
      const std::vector<double> borders = edges(values);
      return std::pair(borders[at], borders[at + 1]);
    };
    for (const Cell* cell : map) {
      if (!cell->network.bits_per_s) continue;
      const auto [left, right] = cut(rates, *cell->network.bits_per_s);
      const auto [low, high] = cut(ranks, cell->ranks);
      const std::size_t place = place_of(options, cell->at.choice().name);
      std::string title =
          fmt::format("{} ranks, {}: takes {}", cell->ranks, cell->network.name, cell->at.choice().name);
      for (const ChoiceAt::Option& option : cell->at.options)
        title += fmt::format("\n{}: {} a step{}", option.name, milliseconds_text(option.step_s),
                             option.tried ? ", tried" : "");
      panel.fields.push_back({{left, high},
                              {right, low},
                              options[place].colour,
                              fmt::format("{} {}", letter(place), gain_text(cell->at)),
                              title});
    }
    panels.push_back(panel);
  }
  return panels.empty() ? "" : panel_figure(panels, "map", "The method that auto would take");
}

std::string caution() {
  return fmt::format(
      "Modelled: auto itself would try what lies within a factor of {:g} of the quickest, at most {} of "
      "them, and take what is quicker there",
      kTried, kMostTried);
}

std::string source_of(const AutoReport::Run& run) {
  const ExchangeProfile& profile = run.profiles[0].profile;
  return fmt::format("{}: {}, {} by {}, batch {} per rank, {}", run.path, profile.model,
                     count_text(profile.ranks, "rank"), profile.backend, profile.batch,
                     count_text(static_cast<std::int64_t>(run.profiles.size()), "option"));
}

}  // namespace

std::vector<NamedProfile> read_auto_profiles(const std::string& run) {
  constexpr std::size_t kMostBytes = 64 << 20;
  std::error_code error;
  if (!std::filesystem::exists(run, error)) throw UserError(run + ": no such run directory");
  const bool folder = std::filesystem::is_directory(run, error);
  const std::string file = folder ? RunDirectory{run}.auto_profiles_json() : run;
  if (!std::filesystem::exists(file, error))
    throw UserError(run +
                    ": no auto_profiles.json in it. A run of two ranks or more that chooses its method "
                    "measures one: train FILE.yaml compress.name=auto dist.ranks=4");
  return parse_auto_profiles(read_text_file(file, kMostBytes), file);
}

AutoReport predict_auto(std::vector<AutoReport::Run> runs, const std::vector<int>& ranks,
                        const std::vector<PredictedNetwork>& networks) {
  AutoReport report;
  std::vector<PredictedNetwork> sorted = networks;
  std::ranges::stable_sort(sorted, [](const PredictedNetwork& a, const PredictedNetwork& b) {
    return std::pair(a.latency, a.bits_per_s) < std::pair(b.latency, b.bits_per_s);
  });
  std::vector<ExchangeProfile> dense;
  for (std::size_t run = 0; run < runs.size(); ++run) {
    dense.push_back(runs[run].profiles[0].profile);
    for (auto first = sorted.begin(), last = first; first != sorted.end(); first = last) {
      last = std::find_if(first, sorted.end(), [&](const auto& n) { return n.latency != first->latency; });
      for (const int count : ranks)
        for (auto network = first; network != last; ++network)
          report.cells.push_back({run, count, *network, choice_at(runs[run].profiles, count, *network)});
    }
  }
  report.assumptions = assumptions_of(dense, networks);
  report.runs = std::move(runs);
  return report;
}

std::string auto_text(const AutoReport& report) {
  const std::vector<Lettered> options = lettered(report);
  std::string text = "MODELLED from measured profiles, not measured. Profiles:\n";
  for (const auto& run : report.runs) text += "  " + source_of(run) + "\n";
  text +=
      "\nWhat compress.name=auto would take, how many times as fast as dense, and + what it would try "
      "besides:\n";
  for (std::size_t i = 0; i < options.size(); ++i) text += "  " + titled(options[i], i) + "\n";
  for (const auto& map : maps_of(report))
    text += "\n" + map_title(report, *map[0]) + "\n\n" + table_text(map_table(map, options)) + "\n" +
            table_text(choice_table(map, options));
  text += "\n" + caution() + ".\n\nAssumptions:\n";
  for (const auto& line : report.assumptions) text += "  " + line + ".\n";
  return text;
}

std::string auto_csv(const AutoReport& report) {
  std::string text = "kind,run,model,ranks,rate,latency_s,option,method,groups,step_s,taken,tried\n";
  for (const Cell& cell : report.cells)
    for (const ChoiceAt::Option& option : cell.at.options)
      text += fmt::format(
          "modelled,{},{},{},{},{},{},{},{},{:.9g},{:d},{:d}\n", csv_quoted(report.runs[cell.run].path),
          csv_quoted(report.runs[cell.run].profiles[0].profile.model), cell.ranks, cell.network.name,
          cell.network.latency ? fmt::format("{:.9g}", *cell.network.latency) : "measured",
          csv_quoted(option.name), option.method, option.groups, option.step_s, &option == &cell.at.choice(),
          option.tried);
  return text;
}

std::string auto_json(const AutoReport& report) {
  using Json = nlohmann::ordered_json;
  Json json;
  json["note"] = caution() + "; seconds";
  for (const auto& run : report.runs) json["profiles"].push_back(source_of(run));
  json["assumptions"] = report.assumptions;
  json["choices"] = Json::array();
  for (const Cell& cell : report.cells) {
    Json row{{"modelled", true},
             {"run", report.runs[cell.run].path},
             {"ranks", cell.ranks},
             {"rate", cell.network.name},
             {"latency_s", cell.network.latency ? Json(*cell.network.latency) : Json("measured")},
             {"choice", cell.at.choice().name},
             {"step_s", cell.at.choice().step_s},
             {"dense_step_s", cell.at.options[0].step_s},
             {"gain", cell.at.gain()}};
    for (const ChoiceAt::Option& option : cell.at.options)
      row["options"].push_back({{"option", option.name},
                                {"method", option.method},
                                {"groups", option.groups},
                                {"step_s", option.step_s},
                                {"tried", option.tried}});
    json["choices"].push_back(row);
  }
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string auto_html(const AutoReport& report) {
  const std::vector<Lettered> options = lettered(report);
  std::vector<BarPart> legend;
  for (std::size_t i = 0; i < options.size(); ++i)
    legend.push_back({titled(options[i], i), options[i].colour});
  std::string html =
      "<h1>What compress.name=auto would choose</h1><p class=\"warning\">" + caution() + ".</p><ul>";
  for (const auto& run : report.runs) html += "<li>" + escape(source_of(run)) + "</li>";
  html +=
      "</ul>\n<h2>The method by link and ranks, modelled</h2><p>How many times as fast as dense its step "
      "is.</p>" +
      bars_legend(legend, false) + maps_html(report, options);
  for (const auto& map : maps_of(report))
    html += "<h2>" + escape(map_title(report, *map[0])) + "</h2>" + table_html(choice_table(map, options));
  html += "<h2>What the model assumes</h2><ul>";
  for (const auto& line : report.assumptions) html += "<li>" + escape(line) + ".</li>";
  return html_page("Topknot: what auto would choose", html + "</ul>");
}

}  // namespace topknot
