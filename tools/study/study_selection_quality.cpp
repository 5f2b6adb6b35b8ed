#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>

#include "compress/select/passes/passes.h"
#include "compress/sparse.h"
#include "nn/base/check.h"
#include "nn/base/text.h"
#include "tools/study/study_selection.h"

namespace topknot {
namespace {

double energy_of(std::span<const float> values) {
  double sum = 0;
  for (const float x : values) sum += static_cast<double>(x) * x;
  return sum;
}

SelectionQuality measure(const SelectionMethod& method, double density, std::size_t steps, std::size_t numel,
                         std::size_t skip, const GradientSource& next) {
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
  row.k = planned_entries(selectors().find(parts.select).traits, {numel, {{0, numel}}, 1}, density);
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
    const SparseVector& sent = *step.entries()->entries;
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
  row.energy /= nonzero;  // NaN where every u is zero
  row.energy_to_topk /= nonzero;
  row.threshold = quantile(std::move(thresholds), 0.5);
  return row;
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
  std::exception_ptr failure;
  // What topk finds first, then all others; each selector runs on one thread.
  for (const bool first : {true, false}) {
#pragma omp parallel for schedule(dynamic, 1)
    for (std::size_t i = 0; i < rows.size(); ++i) try {
        const std::size_t at = i / methods.size();
        SelectionMethod method = methods[i % methods.size()];
        if ((method.options.select == "topk") != first) continue;
        if (method.options.select == "threshold")
          method.options.set("threshold", std::max<double>(threshold[at], std::numeric_limits<float>::min()));
        rows[i] = measure(method, densities[at], steps, numel, skip, gradient);
        if (first) threshold[at] = rows[i].threshold;
      } catch (...) {
#pragma omp critical(study_selection_failure)
        failure = std::current_exception();
      }
    if (failure) std::rethrow_exception(failure);
  }
  return rows;
}

}  // namespace topknot
