#pragma once
// One selection by a selector on its own, its commit and its state.

#include "compress/select/selector.h"
#include "compress/state.h"
#include "tests/compress/simulated_ranks.h"

namespace topknot::testing {

struct Asked {
  double density = 0.01;
  std::int64_t step = 0;
  int rank = 0;
  std::size_t position = 0;
  decltype(SelectorTraits::target) target = SelectorTraits().target;
};

inline CompressOptions regtopk_options(double mu = 4, const std::string& variant = "A", double q = 1e8) {
  CompressOptions options = named("regtopk", {"variant=" + variant});
  options.set("mu", mu), options.set("q", q);
  return options;
}

// u becomes u + addend.
inline Selection select_once(Selector& selector, std::vector<float>& u, const std::vector<float>& addend,
                             const Asked& asked) {
  Selection selected;
  const std::size_t k = asked.target(asked.density, u.size(), {});
  selector.select(u, addend, {k, asked.density, asked.step, asked.rank, asked.position}, selected);
  return selected;
}
inline Selection select_from_copy(Selector& selector, std::vector<float> u, const Asked& asked) {
  return select_once(selector, u, {}, asked);
}
// As many as `k`, whatever the density makes of it.
inline Selection select_k(Selector& selector, std::vector<float>& u, std::size_t k,
                          const std::vector<float>& addend = {}) {
  Selection selected;
  selector.select(u, addend, {.k = k, .density = double(k) / double(u.size())}, selected);
  return selected;
}

// Commits what error feedback does: the residual keeps u without what was selected.
inline void keep_rest(Selector& selector, const Selection& selected, const std::vector<float>& u,
                      std::vector<float>& residual) {
  selector.commit({});
  residual = u;
  for (const std::uint32_t i : selected.indices) residual[i] = 0;
}

// Everything that was selected is sent exactly and accepted.
inline void commit(Selector& selector, const Selection& selected, const std::vector<float>& average,
                   double weight) {
  selector.commit({selected, average, weight});
}

inline std::vector<std::byte> saved(const Selector& selector) {
  StateWriter writer;
  selector.save(writer);
  return writer.take();
}
// What is saved, as a struct of the same fields.
template <class Carried>
Carried carried_as(const Selector& selector) {
  const std::vector<std::byte> bytes = saved(selector);
  Carried read;
  REQUIRE(bytes.size() == sizeof read);
  std::memcpy(&read, bytes.data(), sizeof read);
  return read;
}
inline void restore(Selector& selector, const std::vector<std::byte>& bytes) {
  StateReader reader(bytes);
  selector.load(reader);
  reader.finish();
}

// Ascending positions of x, each with its value.
inline bool well_formed(const Selection& selected, const std::vector<float>& x) {
  if (selected.indices.size() != selected.values.size()) return false;
  for (std::size_t i = 0; i < selected.indices.size(); ++i) {
    if (selected.indices[i] >= x.size() || (i > 0 && selected.indices[i] <= selected.indices[i - 1]))
      return false;
    if (selected.values[i] != x[selected.indices[i]]) return false;
  }
  return true;
}

}  // namespace topknot::testing
