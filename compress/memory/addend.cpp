#include "compress/memory/addend.h"

#include "compress/memory/velocity.h"
#include "compress/parallel.h"

namespace topknot {
namespace {

template <class T>
TOPKNOT_INLINE void velocity_body(T* u, const Addend<T>& addend, std::size_t begin, std::size_t end) {
  constexpr std::size_t width = 64 / sizeof(T);
  with_velocity_step(
      u, addend, begin, [&](const auto& step) __attribute__((always_inline)) {
        std::size_t i = begin;
        for (; i + width <= end; i += width) step.vector(i);
        for (; i < end; ++i) step.one(i);
      });
}
// Overloads, because templates cannot be compiled for several targets.
TOPKNOT_MULTIVERSION void velocity_part(float* u, const Addend<float>& addend, std::size_t begin,
                                        std::size_t end) {
  velocity_body(u, addend, begin, end);
}
TOPKNOT_MULTIVERSION void velocity_part(double* u, const Addend<double>& addend, std::size_t begin,
                                        std::size_t end) {
  velocity_body(u, addend, begin, end);
}

}  // namespace

template <class T>
const T* Addend<T>::add_velocity(std::span<T> u, std::size_t begin, std::size_t end) const {
  if (!velocity) return residual.empty() ? nullptr : residual.data();
  velocity_part(u.data(), *this, begin, end);
  return nullptr;
}

template <class T>
void Addend<T>::add_to(std::span<T> u) const {
  for_parts(u.size(), part_count(u.size()), [&](std::size_t, std::size_t begin, std::size_t end) {
    if (const T* added = add_velocity(u, begin, end))
      for (std::size_t i = begin; i < end; ++i) u[i] += added[i];
  });
}

template struct Addend<float>;
template struct Addend<double>;

}  // namespace topknot
