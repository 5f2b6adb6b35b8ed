#pragma once
// One image's activations between the plain layout, [channels][pixels], and blocks of channel_block() channels that lie side
// by side, [block][pixels][channel of the block]. The last block is filled up with zeros. In the calling thread.

#include "nn/core/tensor.h"

namespace topknot {

void to_blocks(DType type, std::int64_t channels, std::int64_t pixels, const void* plain, void* blocks);
void from_blocks(DType type, std::int64_t channels, std::int64_t pixels, const void* blocks, void* plain);

}  // namespace topknot
