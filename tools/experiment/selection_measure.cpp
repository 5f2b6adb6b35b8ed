// What `experiment selection` measures: the entries that each selector selects of recorded gradients, and its
// cost over sizes.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "compress/memory/memory.h"
#include "compress/parallel.h"
#include "compress/select/passes/passes.h"
#include "compress/select/selector.h"
#include "compress/sparse.h"
#include "nn/base/check.h"
#include "nn/base/clock.h"
#include "nn/base/text.h"
#include "nn/core/device.h"
#include "nn/core/rng.h"
#include "nn/core/simd.h"
#include "tools/experiment/experiment.h"
#include "tools/experiment/selection.h"

namespace topknot {
namespace {

// Over recorded gradients.

double energy_of(std::span<const float> values) {
  double sum = 0;
  for (const float x : values) sum += static_cast<double>(x) * x;
  return sum;
}

SelectionQuality quality_of(const SelectionMethod& method, double density, std::size_t steps,
                            std::size_t numel, std::size_t skip, const GradientSource& next) {
  SparsePreset parts;
  parts.select = method.options.select;
  SparseCompressor step(parts, method.options, {numel, {{0, numel}}, 1});
  std::vector<float> gradient(numel), spare(numel);
  std::span<float> fresh = gradient, residual = spare;
  Candidates found;
  Selection exact;

  SelectionQuality row;
  row.label = method.label;
  row.density = density;
  row.k = planned_entries(selectors().find(parts.select).traits, method.options, {numel, {{0, numel}}, 1},
                          density);
  row.steps = steps - skip;
  row.count_least = std::numeric_limits<double>::infinity();
  std::vector<double> thresholds;
  double nonzero = 0;
  for (std::size_t t = 0; t < steps; ++t) {
    next(t, fresh);
    StepContext info;
    info.step = static_cast<std::int64_t>(t);
    info.density = density;
    const std::vector<std::vector<std::byte>> blocks{step.encode({fresh, residual}, info).block};
    const SparseVector& sent = *step.entries();
    if (!sent.finite)
      throw UserError(
          fmt::format("the gradient of step {} has a NaN or an infinity; record a run that stays finite", t));
    if (t >= skip) {
      const double count = static_cast<double>(sent.indices.size()) / static_cast<double>(row.k);
      row.count_mean += count;
      row.count_least = std::min(row.count_least, count);
      row.count_greatest = std::max(row.count_greatest, count);
      row.within += count >= 0.9 && count <= 1.1;
      thresholds.push_back(step.threshold());
      const std::span<const float> u = step.accumulated();
      if (const double all = energy_of(u); all > 0) {
        select_exact(u, row.k, found, exact);
        const double taken = energy_of(sent.values);
        row.energy += taken / all;
        row.energy_to_topk += taken / energy_of(exact.values);
        ++nonzero;
      }
    }
    Round round;
    round.blocks = blocks;
    step.decode(round);
    if (step.commit({}).data() == residual.data()) std::swap(fresh, residual);
  }
  const auto counted = static_cast<double>(row.steps);
  row.count_mean /= counted;
  row.within /= counted;
  row.energy /= nonzero;  // NaN if every u is zero
  row.energy_to_topk /= nonzero;
  row.threshold = quantile(std::move(thresholds), 0.5);
  return row;
}

// Over sizes.

TOPKNOT_MULTIVERSION void add(float* r, const float* g, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) r[i] += g[i];
}

TOPKNOT_MULTIVERSION void mix(float* out, const float* noise, const float* drift, float sign, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) out[i] = sign * noise[i] + 0.05f * drift[i];
}

// Laplace noise and drift, both cut from one table of random numbers: a piece of 4096 elements from a place
// and with a sign that (step, piece) decide, for the drift the piece alone. As cheap as a copy.
class LaplaceGradients {
 public:
  LaplaceGradients() : table_(kTable + kPiece) {
    const CounterRng rng(1, RngUse::dataset, 3);
    for_parts(table_.size(), part_count(table_.size()), [&](std::size_t, std::size_t begin, std::size_t end) {
      for (std::size_t i = begin; i < end; ++i) {
        const std::uint32_t bits = rng.bits(i);
        const double magnitude = -std::log((static_cast<double>(bits >> 1) + 0.5) * 0x1p-31);
        table_[i] = static_cast<float>(bits & 1 ? magnitude : -magnitude);
      }
    });
  }

  void fill(std::int64_t step, std::span<float> out) const {
    for_parts(out.size(), part_count(out.size()), [&](std::size_t, std::size_t begin, std::size_t end) {
      for (std::size_t i = begin; i < end; i += kPiece) {
        const auto piece = static_cast<std::uint32_t>(i / kPiece);
        const Philox noise = philox4x32({static_cast<std::uint32_t>(step), piece, 0, 0}, {3, 4});
        const Philox drift = philox4x32({0, piece, 1, 0}, {3, 4});
        mix(out.data() + i, table_.data() + noise[0] % kTable, table_.data() + drift[0] % kTable,
            noise[1] & 1 ? 1.0f : -1.0f, std::min(end - i, kPiece));
      }
    });
  }

 private:
  static constexpr std::size_t kTable = std::size_t{1} << 22, kPiece = 4096;
  static_assert(kChunk % kPiece == 0, "a part begins with a piece");
  std::vector<float> table_;
};

// A step's memory and the plain pass's own.
class Buffers {
 public:
  explicit Buffers(std::size_t size) {
    for (std::span<float>* buffer : {&gradient, &spare, &plain_r, &plain_g}) {
      *buffer = {cpu_backend().allocate(size), size};
      cpu_backend().fill_zero(buffer->data(), size);
    }
  }
  ~Buffers() {
    for (const auto& buffer : {gradient, spare, plain_r, plain_g})
      cpu_backend().release(buffer.data(), buffer.size());
    cpu_backend().release_cached();
  }
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;

  std::span<float> gradient, spare, plain_r, plain_g;
};

// `threshold` becomes the median over the steps.
SelectionCost cost_of(const SelectionMethod& method, double density, int rounds, int warmup,
                      const LaplaceGradients& gradients, Buffers& buffers, double& threshold) {
  const SelectorFactory& type = selectors().find(method.options.select);
  const auto selector = type.make(method.options);
  const auto memory = memories().find("residual").make(method.options);
  cpu_backend().fill_zero(buffers.spare.data(), buffers.spare.size());
  std::span<float> gradient = buffers.gradient, residual = buffers.spare;
  SelectStep info;
  info.density = density;
  info.k = type.traits.target(density, gradient.size(), method.options);
  Selection selected;
  std::vector<double> plain, step, ratio, count, thresholds;
  for (int t = 0; t < warmup + rounds; ++t) {
    info.step = t;
    gradients.fill(t, gradient);
    double plain_ms = 0;
    const auto plain_pass = [&] {
      plain_ms = milliseconds_of([&] {
        for_parts(gradient.size(), part_count(gradient.size()),
                  [&](std::size_t, std::size_t begin, std::size_t end) {
                    add(buffers.plain_r.data() + begin, buffers.plain_g.data() + begin, end - begin);
                  });
      });
    };
    if (t % 2) plain_pass();
    double step_ms = milliseconds_of([&] {
      selector->select(gradient, memory->input(gradient, residual), info, selected);
      TOPKNOT_CHECK(selected.finite, "a finite gradient was taken for another");
      memory->commit(gradient, residual, selected, {});
    });
    if (t % 2 == 0) plain_pass();
    // The average is the exchange's work, not selection's.
    const SparseView own = selected;
    average_sparse(std::span(&own, 1), residual);
    step_ms += milliseconds_of([&] { selector->commit({selected, residual, 1.0}); });
    std::swap(gradient, residual);
    if (t < warmup) continue;
    plain.push_back(plain_ms);
    step.push_back(step_ms);
    ratio.push_back(step_ms / plain_ms);
    count.push_back(static_cast<double>(selected.indices.size()) / static_cast<double>(info.k));
    thresholds.push_back(selected.threshold);
  }
  buffers.gradient = gradient;
  buffers.spare = residual;
  threshold = quantile(thresholds, 0.5);
  return {method.label,
          gradient.size(),
          info.k,
          rounds,
          warmup,
          quantile(plain, 0.5),
          quantile(step, 0.5),
          quantile(ratio, 0.5),
          quantile(ratio, 0.25),
          quantile(ratio, 0.75),
          quantile(step, 0) / quantile(plain, 0),
          quantile(count, 0.5)};
}

}  // namespace

std::vector<SelectionMethod> selection_methods() {
  std::vector<std::string> names = selectors().names();
  const auto place = [](const std::string& name) { return name == "topk" ? 0 : name == "threshold" ? 2 : 1; };
  std::stable_sort(names.begin(), names.end(), [&](const std::string& a, const std::string& b) {
    return std::pair(place(a), a) < std::pair(place(b), b);
  });
  std::vector<SelectionMethod> methods;
  for (const std::string& name : names) {
    SelectionMethod method{name, {}};
    method.options.select = name;
    method.options.seed = 1;
    if (name != "sidco") {
      methods.push_back(method);
      continue;
    }
    for (const std::string distribution : {"exponential", "pareto", "gamma"}) {
      method.label = name + " " + distribution;
      method.options.set("distribution", distribution);
      methods.push_back(method);
    }
  }
  return methods;
}

std::vector<SelectionQuality> selection_quality(const std::vector<SelectionMethod>& methods,
                                                const std::vector<double>& densities, std::size_t steps,
                                                std::size_t numel, std::size_t skip,
                                                const GradientSource& gradient) {
  TOPKNOT_CHECK(skip < steps && numel > 0, "steps that count, of something");
  std::vector<SelectionQuality> rows(methods.size() * densities.size());
  std::vector<double> threshold(densities.size());
  // What topk finds first, then all others; each selector runs on one thread.
  for (const bool first : {true, false})
    in_parallel(rows.size(), [&](std::size_t i) {
      const std::size_t at = i / methods.size();
      SelectionMethod method = methods[i % methods.size()];
      if ((method.options.select == "topk") != first) return;
      if (method.options.select == "threshold")
        method.options.set("threshold", std::max<double>(threshold[at], std::numeric_limits<float>::min()));
      rows[i] = quality_of(method, densities[at], steps, numel, skip, gradient);
      if (first) threshold[at] = rows[i].threshold;
    });
  return rows;
}

std::vector<SelectionCost> selection_cost(const std::vector<SelectionMethod>& methods, std::size_t size,
                                          double density, int rounds, int warmup) {
  TOPKNOT_CHECK(size > 0 && rounds > 0 && warmup >= 0, "steps of something");
  Buffers buffers(size);
  const LaplaceGradients gradients;
  gradients.fill(-1, buffers.plain_g);
  std::vector<SelectionCost> rows;
  double threshold = std::numeric_limits<float>::min();
  for (SelectionMethod method : methods) {
    if (method.options.select == "threshold") method.options.set("threshold", threshold);
    double found = 0;
    rows.push_back(cost_of(method, density, rounds, warmup, gradients, buffers, found));
    if (method.options.select == "topk") threshold = std::max(threshold, found);
  }
  return rows;
}

std::size_t selection_cost_bytes(std::size_t size) {
  // Four buffers, an eighth of that for lists of entries, the table of random numbers.
  return 18 * size + (std::size_t{64} << 20);
}

}  // namespace topknot
