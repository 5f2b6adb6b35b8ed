#pragma once
// For code that is built with and without CUDA.

namespace topknot {

int gpu_count();  // GPUs that this process sees; 0 in a build without CUDA

}  // namespace topknot
