#pragma once
// Ops that move whole channels: concatenation, a slice, the shuffle of ShuffleNet.

#include "nn/ops/kernels.h"

namespace topknot {

// [N, C_i, H, W] for each part -> [N, sum C_i, H, W], the parts' channels one after the other.
Variable concat(const std::vector<Variable>& parts);

// Channels [begin, begin + count) of x.
Variable slice_channels(const Variable& x, std::int64_t begin, std::int64_t count);

// Channel g n + i becomes channel i groups + g, for C = groups n (Zhang et al., "ShuffleNet", CVPR 2018, section 3.1).
Variable channel_shuffle(const Variable& x, std::int64_t groups);

// Channels from + i from_step of one tensor and to + i to_step of another, for i < count.
struct ChannelRun {
  std::int64_t count = 0, from = 0, to = 0, from_step = 1, to_step = 1;
  ChannelRun reversed() const { return {count, to, from, to_step, from_step}; }
};

struct ChannelCopyKernels {
  static constexpr const char* op = "a copy of channels";
  static constexpr bool cpu_bfloat16 = true;
  // A layout in which x's channels can be copied so; x's own where possible.
  Layout (*layout)(const Tensor& x, const ChannelRun& run, std::int64_t other_channels);
  // y's channels of the run become x's, or x's are added to them. Both have that layout.
  void (*copy)(const Tensor& x, Tensor& y, const ChannelRun& run, bool accumulate);
};

}  // namespace topknot
