#pragma once
// Proof that the ranks hold the same parameters.

#include <string>

#include "dist/comm/collective_queue.h"
#include "nn/core/parameter.h"

namespace topknot {

std::string checksum_hex(std::span<const float> weights);  // 16 hexadecimal digits

// Compares the ranks' parameters and throws Error, naming the first rank and parameter that differ.
// Collective.
void check_same_parameters(ParameterArena& arena, CollectiveQueue& queue, const Communicator& communicator,
                           const std::string& when);

}  // namespace topknot
