#include "compress/memory/feedback_input.h"

#include "compress/memory/velocity.h"
#include "compress/parallel.h"

namespace topknot {
namespace {

TOPKNOT_MULTIVERSION void velocity_part(float* u, const FeedbackInput& input, std::size_t begin,
                                        std::size_t end) {
  constexpr std::size_t width = 64 / sizeof(float);
  with_velocity_step(
      u, input, begin, [&](const auto& step) __attribute__((always_inline)) {
        std::size_t i = begin;
        for (; i + width <= end; i += width) step.vector(i);
        for (; i < end; ++i) step.one(i);
      });
}

}  // namespace

const float* FeedbackInput::add_velocity(std::span<float> u, std::size_t begin, std::size_t end) const {
  if (!velocity) return residual.empty() ? nullptr : residual.data();
  velocity_part(u.data(), *this, begin, end);
  return nullptr;
}

void FeedbackInput::add_to(std::span<float> u) const {
  for_parts(u.size(), part_count(u.size()), [&](std::size_t, std::size_t begin, std::size_t end) {
    if (const float* added = add_velocity(u, begin, end))
      for (std::size_t i = begin; i < end; ++i) u[i] += added[i];
  });
}

}  // namespace topknot
