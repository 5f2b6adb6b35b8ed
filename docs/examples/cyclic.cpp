// A compressor in one file: step t sends the entries t mod s, t mod s + s, t mod s + 2 s, ... with s = d / k,
// so that every entry travels once in s steps. Error feedback, coding and the exchange are what every sparse
// method uses.
#include <algorithm>
#include <cmath>

#include "compress/sparse_compressor.h"

namespace topknot {
namespace {

template <class T>
class CyclicSelector final : public Selector<T> {
 public:
  void select(std::span<T> u, std::span<const T> addend, const SelectStep& step,
              Selected<T>& selected) override {
    selected.indices.clear();
    selected.values.clear();
    selected.finite = true;
    for (std::size_t i = 0; i < u.size(); ++i) {
      if (!addend.empty()) u[i] += addend[i];
      selected.finite &= std::isfinite(u[i]);
    }
    if (!selected.finite) return;  // all ranks will skip this step
    const std::size_t stride = std::max<std::size_t>(1, u.size() / step.k);
    for (std::size_t i = static_cast<std::size_t>(step.step) % stride; i < u.size(); i += stride) {
      selected.indices.push_back(static_cast<std::uint32_t>(i));
      selected.values.push_back(u[i]);
    }
  }
  // The choice depends on the step alone, so there is nothing to keep or to forget.
  void commit(const SelectOutcome<T>&) override {}
  void discard() override {}
};

const bool registered = [] {
  add_selector<CyclicSelector>("cyclic", "every s-th entry, another one each step");
  add_sparse("cyclic", "every s-th entry in turn: the worked example of docs/extending.md",
             {.select = "cyclic"});
  return true;
}();

}  // namespace
}  // namespace topknot
