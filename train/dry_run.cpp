#include <algorithm>
#include <cstdio>

#include "compress/sparse_step.h"
#include "nn/core/base/text.h"
#include "train/setup.h"

namespace topknot {
namespace {

constexpr int kMostEpochsShown = 12;  // of a density warm-up

void print_parameters(const ParameterStore& store, const ParameterArena& arena, bool compressed) {
  std::printf("%-32s %-18s %12s  %s\n", "parameter", "shape", "elements", "travels");
  for (const auto& p : store.parameters())
    std::printf("%-32s %-18s %12zu  %s\n", p->name().c_str(), p->shape().str().c_str(), p->numel(),
                !p->trained()                     ? "frozen"
                : compressed && p->compressible() ? "compressed"
                                                  : "dense");
  std::printf("%-32s %-18s %12zu\n\n", arena.frozen().empty() ? "total" : "total, without frozen ones", "",
              arena.size());
}

void print_groups(const std::vector<Group>& groups) {
  std::printf("groups, in the order in which they travel:\n");
  for (const Group& group : groups)
    std::printf("  %-10s %12zu elements, %zu parameters: %s .. %s\n",
                group.compressed ? "compressed" : "dense", group.numel(), group.parameters.size(),
                group.parameters.front()->name().c_str(), group.parameters.back()->name().c_str());
}

}  // namespace

void print_dry_run(const Config& config) {
  const RunData data = load_data(config);
  const auto model = build_model(config, *data.train);
  ParameterArena& arena = model->store.arena();
  const ExchangeOptions options = stand_in_options(config, arena);
  const Loader loader(*data.train, loader_options(config, *data.train, true, 0, config.dist.ranks));
  const Plan plan = plan_steps(config, loader);

  const bool dense = config.compress.name == "dense";
  print_parameters(model->store, arena, !dense);
  if (needs_plan(exchange_options(config)))
    std::printf(
        "exchange.merge=%s plans from times that are measured when the run starts; until then one group a "
        "parameter stands here\n",
        config.exchange.merge.c_str());
  if (config.exchange.collective == "auto")
    std::printf("exchange.collective=auto is chosen when the run starts; all_gather stands here\n");
  print_groups(plan_groups(arena, options));
  const double whole = 4.0 * static_cast<double>(arena.size());
  const auto print_bytes = [&](const char* when, double density) {
    const auto bytes = static_cast<double>(planned_bytes(arena, options, 1, density));
    std::printf("  %-22s %10s of %s, %.1f times less\n", when, format_bytes(bytes).c_str(),
                format_bytes(whole).c_str(), whole / bytes);
  };
  const bool by_density = pieces_of(compress_options(config)).has_value();
  std::printf("\nbytes that a rank sends in a step%s:\n", by_density ? ", where k entries travel" : "");
  if (!by_density) print_bytes(config.compress.name.c_str(), 1.0);
  const int warm_up =
      std::max(config.compress.warmup_epochs, static_cast<int>(config.compress.warmup.size()));
  for (int epoch = 0; by_density && epoch <= warm_up; ++epoch) {
    if (epoch == kMostEpochsShown && epoch < warm_up) {
      std::printf("  ...\n");
      epoch = warm_up;
    }
    const double density = density_at_epoch(config, epoch);
    char when[64];
    std::snprintf(when, sizeof when, "epoch %d%s at %.4g", epoch, epoch == warm_up ? " on" : "", density);
    print_bytes(when, density);
  }
  if (by_density && config.compress.layer_density == "auto")
    std::printf("  layer densities are measured when the run starts: a step may send more than this\n");
  // Weights, two gradient-sized buffers and the momentum.
  const int buffers = config.optimizer.momentum > 0 ? 4 : 3;
  std::printf(
      "\nmemory of a rank: %s for weights, gradients, residuals and momenta; activations, and what a method "
      "carries of its own, come on top\n",
      format_bytes(buffers * whole).c_str());
  std::printf(
      "data: %lld training and %lld test samples; %d ranks x batch %d x %d; %lld steps per epoch, %lld in "
      "all\n",
      static_cast<long long>(data.train->size()), static_cast<long long>(data.test->size()),
      config.dist.ranks, config.data.batch_size, config.train.accumulate,
      static_cast<long long>(plan.steps_per_epoch), static_cast<long long>(plan.total_steps));
}

}  // namespace topknot
