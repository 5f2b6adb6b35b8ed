#include "compress/select/passes/passes.h"

#include <algorithm>
#include <limits>

#include "compress/parallel.h"
#include "compress/select/passes/pass_kernels.h"

namespace topknot {
namespace {

using pass::ChunkSums;
using pass::Sink;

// Makes room before the threads start: they must not throw.
template <class T>
void prepare(Candidates<T>& found, std::size_t n, std::size_t parts, std::size_t limit) {
  found.parts.resize(parts);
  const std::size_t capacity = std::min(limit, n) + pass::kGroup;
  for (auto& part : found.parts) {
    if (part.capacity < capacity) {
      part.index.reset(new std::uint32_t[capacity]);
      part.value.reset(new T[capacity]);
      part.capacity = capacity;
    }
    part.count = 0;
    part.largest = 0;
    part.complete = true;
  }
}
template <class T>
Sink<T> open_sink(typename Candidates<T>::Part& part, std::size_t limit) {
  return {part.index.get(), part.value.get(), std::min(limit, part.capacity - pass::kGroup)};
}
template <class T>
void close_sink(const Sink<T>& sink, typename Candidates<T>::Part& part) {
  part.count = sink.complete ? sink.count : 0;
  part.largest = sink.largest;
  part.complete = sink.complete;
}

}  // namespace

template <class T>
std::size_t Candidates<T>::count() const {
  std::size_t total = 0;
  for (const Part& part : parts) total += part.count;
  return total;
}
template <class T>
bool Candidates<T>::complete() const {
  return std::all_of(parts.begin(), parts.end(), [](const Part& part) { return part.complete; });
}
template <class T>
bool Candidates<T>::finite() const {
  return std::all_of(parts.begin(), parts.end(),
                     [](const Part& part) { return part.largest <= largest_finite_key<T>(); });
}

template <class T>
void accumulate_and_collect(std::span<T> u, const std::type_identity_t<Addend<T>>& addend, Key<T> above,
                            std::size_t limit, Candidates<T>& found) {
  const std::size_t parts = part_count(u.size());
  prepare(found, u.size(), parts, limit);
  for_parts(u.size(), parts, [&](std::size_t p, std::size_t begin, std::size_t end) {
    Sink<T> sink = open_sink<T>(found.parts[p], limit);
    pass::accumulate_part(u.data(), addend, begin, end, above, sink);
    close_sink<T>(sink, found.parts[p]);
  });
}

template <class T>
void collect(std::span<const T> u, Key<T> above, std::size_t limit, Candidates<T>& found) {
  const std::size_t parts = part_count(u.size());
  prepare(found, u.size(), parts, limit);
  for_parts(u.size(), parts, [&](std::size_t p, std::size_t begin, std::size_t end) {
    Sink<T> sink = open_sink<T>(found.parts[p], limit);
    pass::collect_part(u.data(), begin, end, above, sink);
    close_sink<T>(sink, found.parts[p]);
  });
}

template <class T>
Moments accumulate_with_moments(std::span<T> u, const std::type_identity_t<Addend<T>>& addend, Key<T> above,
                                std::size_t limit, Candidates<T>& found) {
  const std::size_t n = u.size(), parts = part_count(n);
  const auto made = [&](std::size_t i) { return addend.made(u, i); };
  const double shift = moments_shift(made(0), made(n / 2), made(n - 1));
  std::vector<ChunkSums> sums((n + kChunk - 1) / kChunk);
  prepare(found, n, parts, limit);
  for_parts(n, parts, [&](std::size_t p, std::size_t begin, std::size_t end) {
    Sink<T> sink = open_sink<T>(found.parts[p], limit);
    for (std::size_t i = begin; i < end; i += kChunk) {
      const std::size_t last = std::min(i + kChunk, end);
      sums[i / kChunk] =
          pass::moments_chunk(u.data(), addend.add_velocity(u, i, last), i, last, shift, above, sink);
    }
    close_sink<T>(sink, found.parts[p]);
  });
  Moments result;
  result.finite = found.finite();
  double sum = 0, squares = 0;
  for (const ChunkSums& chunk : sums) {
    sum += chunk.sum;
    squares += chunk.squares;
    result.zero &= chunk.zero;
  }
  static_cast<NormalFit&>(result) = normal_fit(shift, sum, squares, n);
  return result;
}

template <class T>
Moments accumulate_with_moments(std::span<T> u, const std::type_identity_t<Addend<T>>& addend) {
  Candidates<T> not_finite;
  return accumulate_with_moments<T>(u, addend, largest_finite_key<T>(), 0, not_finite);
}

template <class T>
std::vector<std::size_t> count_digits(std::span<const T> u, int shift, int width, Key<T> prefix) {
  const std::size_t bins = std::size_t{1} << width;
  constexpr std::size_t copies =
      4;  // neighbours often fall into one bin; four tables keep the additions apart
  const std::size_t parts = part_count(u.size());
  std::vector<std::uint32_t> tables(parts * copies * bins);
  for_parts(u.size(), parts, [&](std::size_t p, std::size_t begin, std::size_t end) {
    std::uint32_t* table = tables.data() + p * copies * bins;
    for (std::size_t i = begin; i < end; ++i) {
      const Key<T> key = key_of(u[i]) >> shift;
      if ((key >> width) == prefix)
        ++table[(i % copies) * bins + static_cast<std::size_t>(key & static_cast<Key<T>>(bins - 1))];
    }
  });
  std::vector<std::size_t> counts(bins);
  for (std::size_t i = 0; i < tables.size(); ++i) counts[i % bins] += tables[i];
  return counts;
}

template struct Candidates<float>;
template struct Candidates<double>;
template void accumulate_and_collect(std::span<float>, const Addend<float>&, Key<float>, std::size_t,
                                     Candidates<float>&);
template void accumulate_and_collect(std::span<double>, const Addend<double>&, Key<double>, std::size_t,
                                     Candidates<double>&);
template void collect(std::span<const float>, Key<float>, std::size_t, Candidates<float>&);
template void collect(std::span<const double>, Key<double>, std::size_t, Candidates<double>&);
template Moments accumulate_with_moments(std::span<float>, const Addend<float>&, Key<float>, std::size_t,
                                         Candidates<float>&);
template Moments accumulate_with_moments(std::span<double>, const Addend<double>&, Key<double>, std::size_t,
                                         Candidates<double>&);
template Moments accumulate_with_moments(std::span<float>, const Addend<float>&);
template Moments accumulate_with_moments(std::span<double>, const Addend<double>&);
template std::vector<std::size_t> count_digits(std::span<const float>, int, int, Key<float>);
template std::vector<std::size_t> count_digits(std::span<const double>, int, int, Key<double>);

}  // namespace topknot
