#pragma once
// Shared by the benchmarks of selection: options, buffers, gradients, and the plain pass that every time is
// measured against.

#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "compress/parallel.h"
#include "lab/common/clock.h"
#include "lab/common/options.h"
#include "nn/base/text.h"
#include "nn/core/rng.h"

namespace topknot::bench {

struct CommonOptions {
  int threads = 2;
  std::size_t size = 25'600'000;
  std::vector<std::string> streams;  // of GradientStream::names()
  bool json = false;                 // one more line per row, for programs
};

// --threads, --size, --stream and --json. Throws UserError if they make no sense; false if help was printed.
bool parse_common(CLI::App& app, CommonOptions& options, const char* text, int argc, char** argv);

// r += g over all threads: the 12 bytes per element that error feedback cannot go below.
void plain_pass(std::span<float> r, std::span<const float> g);

// The buffers of a step and of the plain pass, zeroed.
struct Buffers {
  explicit Buffers(std::size_t size);
  ~Buffers();
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;
  void clear();  // all but plain_g

  std::span<float> gradient, residual, plain_r, plain_g;
};

inline double median(std::vector<double> values) {
  return quantile(std::move(values), 0.5);
}

// Three models of a gradient over the steps of a run, quick enough to make a fresh one at every step:
//   normal   independent standard normal entries
//   layers   20 layers of equal length, normal, with standard deviations spread evenly in log over two decades
//            (1 to 0.01)
//   laplace  Laplace noise of scale 1 plus a drift that is the same at every step: 0.05 times a normal vector
// A step's noise is cut from one table of random numbers, a piece for each 4096 elements at a place and with
// a sign that hash (step, piece): independent over steps for every purpose of selection, and as cheap as a
// copy.
class GradientStream {
 public:
  static std::vector<std::string> names() { return {"normal", "layers", "laplace"}; }

  GradientStream(std::string name, std::size_t size)
      : name_(std::move(name)), size_(size), table_(kTable + kPiece) {
    const CounterRng rng(1, RngUse::test, name_ == "laplace" ? 1 : 0);
    const bool laplace = name_ == "laplace";
    for_parts(table_.size(), part_count(table_.size()), [&](std::size_t, std::size_t begin, std::size_t end) {
      for (std::size_t i = begin; i < end; ++i) table_[i] = laplace ? laplace_number(rng, i) : rng.normal(i);
    });
    if (laplace) {
      drift_.resize(size);
      const CounterRng normal(2, RngUse::test);
      for_parts(size, part_count(size), [&](std::size_t, std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i) drift_[i] = 0.05f * normal.normal(i);
      });
    }
  }

  // The gradient of one step; out has the stream's size.
  void fill(std::int64_t step, std::span<float> out) const {
    for_parts(size_, part_count(size_), [&](std::size_t, std::size_t begin, std::size_t end) {
      for (std::size_t piece = begin / kPiece; piece * kPiece < end; ++piece) fill_piece(step, piece, out);
    });
  }

 private:
  static constexpr std::size_t kTable = std::size_t{1} << 22, kPiece = 4096;
  static_assert(kChunk % kPiece == 0);

  static float laplace_number(const CounterRng& rng, std::size_t i) {
    const std::uint32_t bits = rng.bits(i);
    const double magnitude = -std::log((static_cast<double>(bits >> 1) + 0.5) * 0x1p-31);
    return static_cast<float>(bits & 1 ? magnitude : -magnitude);
  }

  void fill_piece(std::int64_t step, std::size_t piece, std::span<float> out) const {
    const Philox random =
        philox4x32({static_cast<std::uint32_t>(step), static_cast<std::uint32_t>(piece), 0, 0}, {3, 4});
    const float* from = table_.data() + random[0] % kTable;
    const std::size_t begin = piece * kPiece, end = std::min(begin + kPiece, size_);
    float scale = random[1] & 1 ? 1.0f : -1.0f;
    if (name_ == "layers")  // a piece on a border belongs to the layer of its first element
      scale *= std::pow(10.0f, -2.0f * static_cast<float>(begin * 20 / size_) / 19.0f);
    if (drift_.empty())
      for (std::size_t i = begin; i < end; ++i) out[i] = scale * from[i - begin];
    else
      for (std::size_t i = begin; i < end; ++i) out[i] = scale * from[i - begin] + drift_[i];
  }

  std::string name_;
  std::size_t size_;
  std::vector<float> table_, drift_;
};

}  // namespace topknot::bench
