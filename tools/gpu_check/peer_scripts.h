#pragma once
// The PyTorch peers, which gpu-check carries with it, so that it needs no folder of scripts.

#include <string>

namespace topknot::gpu_check {

// Writes scripts/peers/NAME into the folder and returns its path.
std::string write_peer_script(const std::string& folder, const std::string& name);

}  // namespace topknot::gpu_check
