// predict RUN [RUN...] [options], predict --papers: modelled scaling. Exit codes: 0, 1 for an error, 2 for
// bad input.

#include <charconv>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <set>

#include "dist/plan/merge_plan.h"
#include "dist/sparse/sparse_collective.h"
#include "lab/common/options.h"
#include "lab/predict/predict.h"
#include "lab/predict/predict_auto.h"
#include "nn/base/program.h"
#include "nn/base/text.h"
#include "train/metrics/output_file.h"

using namespace topknot;

namespace {

constexpr const char* kText =
    "predict: from one profiled run, how training would scale. Every figure is modelled.\n\n"
    "  predict RUN [RUN...] [options]\n"
    "  predict RUN [RUN...] --auto [options]\n"
    "  predict --papers\n\n"
    "RUN is a run directory with exchange_profile.json, which a run leaves that plans its merging or chooses "
    "its\n"
    "collective (exchange.merge=optimal, exchange.collective=auto), or such a file; one RUN per method. "
    "Prints\n"
    "modelled speed-up, scaling efficiency and iteration time.\n\n"
    "  --auto              what compress.name=auto would choose, by the model alone, on links of 10mbit to\n"
    "                      10gbit with 2 to 32 ranks, or by --rate, --latency, --ranks. RUN chose by\n"
    "                      compress.name=auto, which leaves auto_profiles.json; one RUN per model\n"
    "  --ranks LIST        numbers of ranks (default: 1,2,4,...,1024)\n"
    "  --rate LIST         link rates: 100mbit, 1gbit, 10gbit, bits per second, measured (default: "
    "measured)\n"
    "  --latency LIST      per message: 50us, 0.2ms, or seconds (default: as measured)\n"
    "  --tcp-share X       the part of a given rate that reaches the payload (default: 0.96)\n"
    "  --merge LIST        rules of exchange.merge, by train --list merges (default: all,optimal)\n"
    "  --method LIST       which of the profiled methods, and dense, which any profile can predict\n"
    "                      (default: dense and all that were profiled)\n"
    "  --collective LIST   collectives, by train --list collectives, or auto (default: all_gather); of\n"
    "                      methods that send entries\n"
    "  --every LIST        local steps between two exchanges, by exchange.every; 0: gradients, in every "
    "step\n"
    "                      (default: 0)\n"
    "  --measured DIR ...  runs, or replays that bench wrote, to compare with the model: error in percent.\n"
    "                      DIR:rate=100mbit says which network it had (default: the first --rate)\n"
    "  --out DIR           also write prediction.csv, prediction.json and prediction.html\n"
    "  --papers            published settings, modelled without a profile, beside what the papers claim\n\n"
    "Examples:\n"
    "  train configs/demo_topk.yaml compress.scope=group exchange.merge=optimal dist.backend=gloo "
    "output.dir=runs/p4\n"
    "  predict runs/p4 --rate 100mbit,1gbit,10gbit --out scaling\n"
    "  predict runs/p4 --ranks 4,16 --collective auto --measured runs/p4 runs/replay16:rate=100mbit\n"
    "  train configs/demo_topk.yaml compress.name=auto dist.ranks=2 output.dir=runs/auto\n"
    "  predict runs/auto --auto --rate 10mbit,100mbit,1gbit --ranks 2,8 --out choices\n";

constexpr double kMostRanks = 1 << 20, kMostSteps = 1e9;

double parse_number(const std::string& option, const std::string& text, double least, double most) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || !(value >= least && value <= most))
    throw UserError(option + ": '" + text + "' is no number from " +
                    range_text({.name = option, .help = {}, .least = least, .greatest = most}));
  return value;
}

struct Arguments {
  std::vector<std::string> runs, measured;
  std::vector<std::string> ranks, rates, latencies, merges{"all", "optimal"}, methods,
      collectives{"all_gather"}, every{"0"};
  std::string tcp_share, out;
  bool papers = false, automatic = false;
};

bool parse(int argc, char** argv, Arguments& a) {
  CLI::App app("predict");
  const auto list = [&app](const char* name, std::vector<std::string>& values) {
    return app.add_option(name, values)->delimiter(',')->allow_extra_args(false);  // a RUN may follow
  };
  CLI::Option* papers = app.add_flag("--papers", a.papers);
  CLI::Option* automatic = app.add_flag("--auto", a.automatic);
  // Options that auto chooses by itself.
  for (CLI::Option* option :
       {list("--merge", a.merges), list("--method", a.methods), list("--collective", a.collectives),
        list("--every", a.every), app.add_option("--measured", a.measured)})
    option->excludes(papers)->excludes(automatic);
  for (CLI::Option* option : {automatic, list("--ranks", a.ranks), list("--rate", a.rates),
                              list("--latency", a.latencies), app.add_option("--tcp-share", a.tcp_share),
                              app.add_option("--out", a.out), app.add_option("runs", a.runs)})
    option->excludes(papers);
  return parse_options(app, kText, argc, argv);
}

std::vector<PredictedNetwork> networks(const Arguments& a) {
  const double share =
      a.tcp_share.empty() ? kTcpEfficiency : parse_number("--tcp-share", a.tcp_share, 0.01, 1);
  std::vector<PredictedNetwork> result;
  for (const std::string& rate : a.rates) {
    PredictedNetwork network = parse_network_rate(rate);
    network.efficiency = share;
    if (a.latencies.empty()) result.push_back(network);
    for (const std::string& latency : a.latencies) {
      network.latency = parse_latency("--latency", latency);
      result.push_back(network);
    }
  }
  return result;
}

std::set<int> whole_numbers(const std::string& option, const std::vector<std::string>& texts, double least,
                            double most) {
  std::set<int> result;
  for (const std::string& text : texts) {
    const double value = parse_number(option, text, least, most);
    if (value != std::floor(value)) throw UserError(option + ": '" + text + "' is no whole number");
    result.insert(static_cast<int>(value));
  }
  return result;
}

std::vector<int> ranks(const Arguments& a) {
  std::set<int> result = whole_numbers("--ranks", a.ranks, a.automatic ? 2 : 1, kMostRanks);
  if (result.empty() && a.automatic) return {2, 4, 8, 16, 32};
  if (result.empty())
    for (int p = 1; p <= 1024; p *= 2) result.insert(p);
  return {result.begin(), result.end()};
}

// The methods to predict: of the profiles, those asked for, and dense.
std::vector<ExchangeProfile> subjects(const Arguments& a, const std::vector<ExchangeProfile>& profiles) {
  const std::set<std::string> wanted(a.methods.begin(), a.methods.end());
  std::set<std::string> known{"dense"};
  std::vector<ExchangeProfile> result;
  const ExchangeProfile* dense = &profiles[0];
  for (const auto& profile : profiles) {
    known.insert(profile.method);
    if (profile.is_dense()) dense = &profile;
  }
  for (const std::string& method : wanted)
    if (!known.contains(method))
      throw UserError("--method: no run given was profiled with '" + method +
                      "'; its encoding costs are not known, so profile a run of it and give that too");
  if (wanted.empty() || wanted.contains("dense")) result.push_back(dense_profile(*dense));
  std::set<std::string> seen;
  for (const auto& profile : profiles) {
    if (profile.is_dense() || (!wanted.empty() && !wanted.contains(profile.method))) continue;
    if (!seen.insert(profile.method + short_text(profile.density) + profile.options).second)
      throw UserError("two of the runs were profiled with " + profile.method + " at density " +
                      short_text(profile.density) + " and the same options; give one of them");
    result.push_back(profile);
  }
  return result;
}

Judgement judged(std::string folder, const std::vector<ExchangeProfile>& profiles, PredictedNetwork network) {
  if (const auto at = folder.rfind(":rate="); at != std::string::npos) {
    const double share = network.efficiency;
    network = parse_network_rate(folder.substr(at + 6));
    network.efficiency = share;
    folder.resize(at);
  }
  return judge(read_measured(folder), profiles, network);
}

// To the terminal, and to the files of --out.
void write_out(const std::string& out, const std::string& text, const std::string& csv,
               const std::string& json, const std::string& html) {
  std::cout << text;
  if (!out.empty()) {
    std::error_code error;
    std::filesystem::create_directories(out, error);
    if (error) throw UserError("--out: " + out + ": " + error.message());
    for (const auto& [ending, content] :
         {std::pair("csv", csv), std::pair("json", json), std::pair("html", html)}) {
      const std::string file = out + "/prediction." + ending;
      check_output(file, Replace::reports, "choose another folder");
      write_file(file, content);
    }
    std::cout << "\nWritten: " << out << "/prediction.csv, .json, .html\n";
  }
  std::cout.flush();
}

int run_auto(const Arguments& a) {
  const auto nets = networks(a);
  const auto counts = ranks(a);
  std::vector<AutoReport::Run> runs;
  for (const auto& folder : a.runs) runs.push_back({folder, read_auto_profiles(folder)});
  const AutoReport report = predict_auto(std::move(runs), counts, nets);
  write_out(a.out, auto_text(report), auto_csv(report), auto_json(report), auto_html(report));
  return 0;
}

int run(int argc, char** argv) {
  Arguments a;
  if (!parse(argc, argv, a)) return 0;
  if (a.papers) {
    std::cout << papers_text();
    std::cout.flush();
    return 0;
  }
  if (a.runs.empty()) misuse("predict", "no run given");
  if (a.rates.empty() && a.automatic)
    a.rates = {"10mbit", "30mbit", "100mbit", "300mbit", "1gbit", "3gbit", "10gbit"};
  if (a.automatic) return run_auto(a);
  if (a.rates.empty()) a.rates = {"measured"};
  for (const auto& merge : a.merges) parse_merge(merge);
  for (const auto& name : a.collectives)
    if (name != "auto" && !collectives().contains(name))
      throw UserError("--collective: " + unknown_name_message("collective", name, collectives().names()) +
                      ", auto");
  const auto nets = networks(a);
  const auto counts = ranks(a);
  const auto every = whole_numbers("--every", a.every, 0, kMostSteps);
  std::vector<ExchangeProfile> profiles;
  PredictReport report;
  for (const auto& folder : a.runs) {
    profiles.push_back(read_predictable(folder));
    report.sources.push_back(source_line(folder, profiles.back()));
  }
  const auto shown = subjects(a, profiles);
  for (const auto& network : nets)
    for (const auto& profile : shown)
      for (const auto& collective : a.collectives) {
        if (!sends_entries(profile) && collective != a.collectives.front()) continue;
        for (const auto& merge : a.merges)
          for (const int steps : every)
            for (const int count : counts)
              report.predictions.push_back(predict(
                  profile,
                  {count, network, merge, sends_entries(profile) ? collective : "all_gather", {}, steps}));
      }
  for (const auto& folder : a.measured) report.judgements.push_back(judged(folder, profiles, nets.front()));
  report.assumptions = assumptions_of(profiles, nets);
  write_out(a.out, prediction_text(report), prediction_csv(report), prediction_json(report),
            prediction_html(report));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return run_program("predict", run, argc, argv);
}
