#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <memory>

#include "compress/memory/memory.h"
#include "compress/parallel.h"
#include "compress/select/selector.h"
#include "compress/sparse.h"
#include "nn/base/check.h"
#include "nn/base/clock.h"
#include "nn/base/text.h"
#include "nn/core/device.h"
#include "nn/core/rng.h"
#include "nn/core/simd.h"
#include "tools/study/study_selection.h"

namespace topknot {
namespace {

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

struct Measured {
  SelectionCost row;
  double threshold = 0;  // the median
};

Measured measure(const SelectionMethod& method, double density, int rounds, int warmup,
                 const LaplaceGradients& gradients, Buffers& buffers) {
  const SelectorFactory& type = selectors().find(method.options.select);
  const auto selector = type.make(method.options);
  const auto memory = memories().find("residual").make(method.options);
  cpu_backend().fill_zero(buffers.spare.data(), buffers.spare.size());
  std::span<float> gradient = buffers.gradient, residual = buffers.spare;
  SelectStep info;
  info.density = density;
  info.k = type.traits.target(density, gradient.size());
  Selection selected;
  std::vector<double> plain, step, ratio, count, threshold;
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
    threshold.push_back(selected.threshold);
  }
  buffers.gradient = gradient;
  buffers.spare = residual;
  Measured measured;
  measured.row = {method.label,
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
  measured.threshold = quantile(threshold, 0.5);
  return measured;
}

}  // namespace

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
    const Measured measured = measure(method, density, rounds, warmup, gradients, buffers);
    if (method.options.select == "topk") threshold = std::max(threshold, measured.threshold);
    rows.push_back(measured.row);
  }
  return rows;
}

std::size_t selection_cost_bytes(std::size_t size) {
  // Four buffers, an eighth of that for lists of entries, the table of random numbers.
  return 18 * size + (std::size_t{64} << 20);
}

}  // namespace topknot
