// A compressor in one file: with s = ceil(d / k), step t sends the entries i with i mod s = (t + phase) mod
// s, so that every entry is sent once in s steps. Error feedback, coding and the exchange are what every
// sparse method uses.
#include <cmath>

#include "compress/sparse.h"

namespace topknot {
namespace {

// The key compress.phase: in --help, checked, in config.yaml, and named if another method leaves it unused.
const Option kPhase{.name = "phase",
                    .standard = 0,
                    .help = "steps by which the cycle is shifted",
                    .least = 0,
                    .greatest = 1e9};

class CyclicSelector final : public Selector {
 public:
  explicit CyclicSelector(const CompressOptions& options)
      : phase_(static_cast<std::size_t>(options.get<int>(kPhase))) {}

  void select(std::span<float> u, const FeedbackInput& input, const SelectStep& step,
              Selection& selected) override {
    selected.indices.clear();
    selected.values.clear();
    selected.finite = true;
    input.add_to(u);
    for (const float x : u) selected.finite &= std::isfinite(x);
    if (!selected.finite) return;  // all ranks will skip this step
    const std::size_t stride = (u.size() + step.k - 1) / step.k;
    for (std::size_t i = (static_cast<std::size_t>(step.step) + phase_) % stride; i < u.size(); i += stride) {
      selected.indices.push_back(static_cast<std::uint32_t>(i));
      selected.values.push_back(u[i]);
    }
  }

 private:
  std::size_t phase_;
};

const bool cyclic_registered[] = {
    add_selector<CyclicSelector>("cyclic", "every s-th entry, another one each step", {.at_most_k = true},
                                 {kPhase}),
    add_sparse("cyclic", "every s-th entry in turn: the worked example of docs/extending.md",
               {.select = "cyclic"})};

}  // namespace
}  // namespace topknot
