#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <span>
#include <vector>

#include "dist/comm/link.h"
#include "dist/plan/schedule.h"
#include "lab/predict/page.h"
#include "lab/predict/predict.h"

namespace topknot {
namespace {

std::string ms(double seconds) {
  return fmt::format("{:.{}f}", 1e3 * seconds, seconds < 0.01 ? 1 : 0);
}
std::string times(double ratio) {
  return fmt::format("{:.2f}x", ratio);
}
std::string percent(double modelled, double published) {
  return fmt::format("{:+.0f} %", 100 * (modelled / published - 1));
}

// `count` equal layers; `work` in any unit, of the backward pass.
struct Part {
  double elements = 0, work = 0;
  int count = 1;
};

// Parts from input to output; layers come out in order of sending, with `backward` seconds spread by work.
std::vector<LayerCost> layers_of(const std::vector<Part>& parts, double backward) {
  double all = 0;
  for (const Part& part : parts) all += part.work;
  std::vector<LayerCost> layers;
  for (auto part = parts.rbegin(); part != parts.rend(); ++part)
    for (int i = 0; i < part->count; ++i)
      layers.push_back({part->elements / part->count, backward * part->work / all / part->count});
  return layers;
}

// Millions of multiply-adds per image, from the public architectures.
const std::vector<Part> kResNet50{{9536, 118},         {215808, 680, 9},   {1219584, 1037, 12},
                                  {7098368, 1469, 18}, {14964736, 811, 9}, {2049000, 2}};
const std::vector<Part> kVgg16{{38720, 1940, 2},   {221440, 2770, 2}, {1475328, 4620, 3}, {5899776, 4620, 3},
                               {7079424, 1390, 3}, {102764544, 103},  {16781312, 17},     {4097000, 4}};
const std::vector<Part> kAlexNet{{34944, 105}, {307456, 224},  {885120, 150},  {663936, 112},
                                 {442624, 75}, {37752832, 38}, {16781312, 17}, {4097000, 4}};
const std::vector<Part> kInceptionV4{{42.68e6, 1, 150}};  // spread evenly: its layers are many and alike
const std::vector<Part> kVgg16Cifar{{1728, 1.8},     {36864, 37.7},   {73728, 18.9},  {147456, 37.7},
                                    {294912, 18.9},  {589824, 37.7},  {589824, 37.7}, {1179648, 18.9},
                                    {2359296, 37.7}, {2359296, 37.7}, {2359296, 9.4}, {2359296, 9.4},
                                    {2359296, 9.4},  {5120, 0}};
const std::vector<Part> kLstmPtb{{15e6, 0}, {18.01e6, 18}, {18.01e6, 18}, {15.01e6, 15}};

// Top-k on a GPU takes s x log2 x seconds for x elements: the authors' code of OMGS-SGD.
constexpr double kTopkV100 = 4.99671953e-10, kTopkP102 = 2.18896957e-10;
std::function<double(double)> topk_seconds(double s) {
  return [s](double x) { return x > 1 ? s * x * std::log2(x) : 0.0; };
}

// All-gather of values and indices by 16 ranks: the same code's 2 (a + 4 P k b).
std::function<double(double)> gather16(double a, double b, double density) {
  return [=](double x) { return x > 0 ? 2 * (a + 4 * 16 * density * x * b) : 0.0; };
}

struct Modelled {
  double encode = 0, exposed = 0, total = 0;
};

enum class Plan { one_group, omgs, optimal };

Modelled model_step(double forward, const std::vector<LayerCost>& layers, const CostModel& cost, Plan plan) {
  std::vector<std::size_t> groups{layers.size()};
  if (plan == Plan::omgs) groups = merge_omgs(layers, cost);
  if (plan == Plan::optimal) groups = merge_optimal(layers, cost);
  const Timeline timeline = evaluate(layers, groups, cost);
  double backward = 0;
  for (const LayerCost& layer : layers) backward += layer.backward;
  Modelled result;
  result.encode = timeline.groups.back().encoded - backward;
  result.exposed = timeline.makespan - timeline.groups.back().encoded;
  result.total = forward + timeline.makespan;
  return result;
}

std::string gaussiank_text() {
  struct Row {
    const char* name;
    const std::vector<Part>& parts;
    double compute;
  };
  const Row rows[] = {{"AlexNet", kAlexNet, 0.030},
                      {"VGG-16", kVgg16, 0.53},
                      {"ResNet-50", kResNet50, 0.36},
                      {"Inception-v4", kInceptionV4, 0.85}};
  const CostModel dense{[](double) { return 0.0; },
                        [](double x) { return x > 0 ? 9.081e-4 + 7.3957e-10 * 4 * x : 0.0; }};
  const CostModel topk{topk_seconds(kTopkV100), gather16(1.4e-4, 2.0e-10, 0.001)};
  const CostModel gaussian{[](double x) { return 12 * 4 * x / 700e9; }, topk.communicate};
  Table table;
  double least[2] = {1e300, 1e300}, most[2] = {0, 0};  // over Dense, over TopK
  table.header = {"modelled, ms", "compute (assumed)",  "Dense",    "Dense, overlapped", "TopK", "GaussianK",
                  "over Dense",   "over it overlapped", "over TopK"};
  for (const Row& row : rows) {
    const double forward = row.compute / 3;
    const auto layers = layers_of(row.parts, row.compute - forward);
    const double whole = model_step(forward, layers, dense, Plan::one_group).total;
    const double overlapped = model_step(forward, layers, dense, Plan::optimal).total;
    const double t = model_step(forward, layers, topk, Plan::one_group).total;
    const double g = model_step(forward, layers, gaussian, Plan::one_group).total;
    const double over[2] = {whole / g, t / g};
    for (int i = 0; i < 2; ++i) least[i] = std::min(least[i], over[i]), most[i] = std::max(most[i], over[i]);
    table.rows.push_back({row.name, ms(row.compute), ms(whole), ms(overlapped), ms(t), ms(g),
                          times(whole / g), times(overlapped / g), times(t / g)});
  }
  return "1. GaussianK-SGD: 16 V100, 10 GbE, density 0.001, batch 128 a GPU, one merged group. MODELLED\n\n" +
         table_text(table) + "\nModelled over these four: " + times(least[0]) + " to " + times(most[0]) +
         " over Dense, " + times(least[1]) + " to " + times(most[1]) + " over TopK." + R"(
Claim (measured, Shi et al., 2019, arXiv 1911.08772; quoted at second hand, the paper's own table was not at
hand): 1.19x to 2.33x over Dense, 1.36x to 3.63x over TopK. The model's ranges are wider, most of all for AlexNet,
whose step is assumed the shortest; and against a Dense that overlaps little is left of the gain.
Published inputs: all-reduce 9.081e-4 s + 7.3957e-10 s/byte and all-gather 2 (1.4e-4 + 2.0e-10 4 P k) s of 16
ranks (code of MG-WFBP); top-k 4.997e-10 x log2 x s (code of OMGS-SGD). Assumed: compute times (typical fp32
throughput of a V100, a third of it forward); GaussianK reads memory 12 times at 700 GB/s.
)";
}

// The compute seconds at which P ranks whose exchange hides nothing are `speed_up` times as fast as one.
double compute_for(double speed_up, int ranks, double exchange) {
  return exchange / (ranks / speed_up - 1);
}

std::string dgc_text() {
  struct Row {
    const char* name;
    double elements, dgc_bytes, compute;
  };
  constexpr int kRanks = 64;
  const Row rows[] = {{"AlexNet", 60965224, 0.3891 * 1048576, 0.043},
                      {"ResNet-50", 25557032, 0.3526 * 1048576, 0.29}};
  Table table;
  table.header = {"modelled, 64 nodes", "method", "compute ms (assumed)",     "exchange ms",
                  "speed-up",           "claim",  "claim holds at compute ms"};
  for (const Row& row : rows)
    for (const double gbit : {1.0, 10.0})
      for (const bool compressed : {false, true}) {
        const Link link{5e-5, 8 / (gbit * 1e9 * kTcpEfficiency), 0};
        const double exchange = compressed ? all_gather_cost(link, kRanks, row.dgc_bytes)
                                           : ring_all_reduce_cost(link, kRanks, 4 * row.elements);
        const bool alexnet = row.compute < 0.1;
        const double claim = alexnet && compressed && gbit == 1     ? 40
                             : alexnet && !compressed && gbit == 10 ? 30
                                                                    : 0;
        table.rows.push_back({fmt::format("{}, {:.0f} Gbit/s", row.name, gbit), compressed ? "DGC" : "dense",
                              ms(row.compute), ms(exchange),
                              times(kRanks * row.compute / (row.compute + exchange)),
                              claim == 40   ? "over 40x"
                              : claim == 30 ? "about 30x"
                                            : "none at hand",
                              claim > 0 ? ms(compute_for(claim, kRanks, exchange)) : "-"});
      }
  return "2. DGC: 64 nodes at 1 and 10 Gbit/s, density 0.001. MODELLED\n\n" + table_text(table) +
         R"(
Claim (itself a model, that of TernGrad with profiled steps; Lin et al., ICLR 2018, figure 6): AlexNet on 64 nodes
over 40x on 1 Gbit/s with DGC, about 30x on 10 Gbit/s without. No step time of theirs is at hand; the one assumed
here (AlexNet batch 128, ResNet-50 batch 64 on a P100-class GPU) does not reach the claims. The last column says
for which step time this model would: both claims ask for nearly the same one.
Published inputs: message sizes (0.39 and 0.35 MB, tables 3 and 4). Assumed: one rank a node, ring for dense,
all-gather for DGC, nothing overlaps, encoding free, 50 us per message, 96 % of the rate.
)";
}

std::string omgs_text() {
  struct Row {
    const char* name;
    const std::vector<Part>& parts;
    double forward, backward, topk_encode, topk_exposed, omgs_encode, omgs_exposed;
    double density;
  };
  const Row rows[] = {{"VGG-16/CIFAR-10", kVgg16Cifar, .021, .0313, .0767, .207, .0737, .205, 0.001},
                      {"ResNet-50/ImageNet", kResNet50, .09, .12, .1376, .3185, .1321, .165, 0.001},
                      {"Inception-v4/ImageNet", kInceptionV4, .305, .524, .2368, .5357, .22, .19409, 0.001},
                      {"LSTM-PTB", kLstmPtb, .076, .13089, .37548, .437, .33875, .3705, 0.004}};
  Table table;
  table.header = {"ms",        "plan",           "sparsify modelled", "published", "exposed modelled",
                  "published", "total modelled", "published",         "error"};
  for (const Row& row : rows) {
    const auto layers = layers_of(row.parts, row.backward);
    const CostModel cost{topk_seconds(kTopkP102), gather16(1.1e-2, 1.7e-8, row.density)};
    for (const auto& [name, plan] :
         {std::pair("TopK-SGD, one group", Plan::one_group), std::pair("OMGS-SGD", Plan::omgs),
          std::pair("our optimal", Plan::optimal)}) {
      const Modelled m = model_step(row.forward, layers, cost, plan);
      std::vector<std::string> cells{row.name, name,        ms(m.encode), "-", ms(m.exposed),
                                     "-",      ms(m.total), "-",          "-"};
      if (plan != Plan::optimal) {
        const bool one = plan == Plan::one_group;
        const double encode = one ? row.topk_encode : row.omgs_encode;
        const double exposed = one ? row.topk_exposed : row.omgs_exposed;
        const double total = row.forward + row.backward + encode + exposed;
        cells[3] = ms(encode), cells[5] = ms(exposed), cells[7] = ms(total),
        cells[8] = percent(m.total, total);
      }
      table.rows.push_back(cells);
    }
  }
  return "3. OMGS-SGD: 16 GPUs (P102-100), 1 GbE, density 0.001 (LSTM 0.004). MODELLED beside published\n\n" +
         table_text(table) +
         R"(
Claim (measured, Shi et al., INFOCOM 2020): up to 31 % faster than TopK-SGD; the published seconds are those of the
authors' bar chart. Published inputs: forward, backward, top-k 2.189e-10 x log2 x s, all-gather
2 (1.1e-2 + 1.7e-8 4 P k) s of 16 ranks. Assumed: the backward time spread over layers by multiply-adds
(Inception-v4: evenly), density 0.004 for the LSTM. The sparsify column of TopK-SGD agrees; the published
constants do not give the published communication, and with them the greedy merges CNNs into one group.
)";
}

}  // namespace

std::string papers_text() {
  return "Published settings as this program's schedule model has them, beside the papers' claims. Every "
         "figure under a\nheading with MODELLED is modelled, but for the columns and lines that say "
         "published "
         "or claim.\n\n" +
         gaussiank_text() + "\n" + dgc_text() + "\n" + omgs_text();
}

}  // namespace topknot
